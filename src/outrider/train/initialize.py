"""Where a drafter starts: layers of the target, its last tapped feature, and the bigrams of its own text.

Nothing here is needed for correctness; it is worth many steps of training. A draft layer taken from target layer j
makes its context keys and values from a feature normed for another layer, so its input norm is replaced by that norm
and the ratio of the two is folded into its projections: what they compute from block rows stays the same.

Shape legend: V target vocabulary, W draft vocabulary, D hidden size, r Markov rank, X non-zero entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.decoder import Decoder, DecoderLayer
from outrider.models.dspark import DSparkDrafter
from outrider.models.tokenizer import Tokenizer
from outrider.train.data import TokenStore

_SMOOTHING = 8.0  # pseudo-counts a bigram row gets from the unigram distribution


def choose_draft_vocab(store: TokenStore, tokenizer: Tokenizer, *, vocab_size: int, size: int) -> Tensor:
    """int64 [W], ascending: special ids, single characters, then the most frequent ids of the data, then low ids."""
    if size >= vocab_size:
        return torch.arange(vocab_size)
    counts_V = torch.bincount(store.tokens_C[: store.used].long(), minlength=vocab_size).double()
    characters = [i for i in range(tokenizer.vocab_size) if len(tokenizer.id_to_token(i)) == 1]
    specials = sorted({*tokenizer.special_token_ids, *tokenizer.eos_token_ids})
    if len(specials) > size:
        raise ConfigError(f"draft_vocab_size={size} does not hold the {len(specials)} special ids")
    counts_V -= torch.arange(vocab_size) / vocab_size  # ids without a count: the lower, the more common in general
    counts_V[characters] += store.used + 1
    counts_V[specials] = torch.inf
    return counts_V.topk(size).indices.sort().values


@torch.no_grad()
def initialize(drafter: DSparkDrafter, target: Decoder, store: TokenStore, *, layer_ids: Sequence[int]) -> None:
    """Fill every parameter of ``drafter``; ``layer_ids`` are the target layers its layers start from."""
    hidden = drafter.config.decoder.hidden_size
    last_tap = drafter.config.target_layer_ids[-1]
    follower = target.layers[min(last_tap + 1, len(target.layers) - 1)]
    assert isinstance(follower, DecoderLayer)
    context_norm_D = follower.input_layernorm.weight.float()
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    drafter.hidden_norm.weight.copy_(context_norm_D)
    drafter.norm.weight.copy_(target.norm.weight)
    sample_NF = store.taps_CF[: min(store.used, 2048)]
    context_ND = drafter.project_context(sample_NF)
    for layer, layer_id in zip(drafter.layers, layer_ids, strict=True):
        source = target.layers[layer_id]
        assert isinstance(layer, DecoderLayer)
        assert isinstance(source, DecoderLayer)
        _copy_layer(layer, source, context_norm_D)
        if drafter.config.decoder.qk_norm and not target.config.qk_norm:
            _set_head_norms(layer, context_ND)
    if drafter.markov_head is not None:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in drafter.markov_head.named_parameters():
            if "proj" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator) * (parameter.ndim > 1))
        w1_Vr, w2_Wr = bigram_factors(
            store, drafter.draft_to_target_V, target.config.vocab_size, drafter.config.markov_rank
        )
        drafter.markov_head.markov_w1.weight.copy_(w1_Vr)
        drafter.markov_head.markov_w2.weight.copy_(w2_Wr)
    if drafter.confidence_head is not None:
        for parameter in drafter.confidence_head.parameters():
            parameter.zero_()


def _copy_layer(layer: DecoderLayer, source: DecoderLayer, context_norm_D: Tensor) -> None:
    state = {name: tensor.float() for name, tensor in source.state_dict().items()}
    ratio_D = state["input_layernorm.weight"] / torch.where(context_norm_D.abs() < 1e-3, 1e-3, context_norm_D)
    state["self_attn.qkv_proj.weight"] = state["self_attn.qkv_proj.weight"] * ratio_D
    state["input_layernorm.weight"] = torch.where(context_norm_D.abs() < 1e-3, 1e-3, context_norm_D)
    names = layer.load_state_dict(state, strict=False)
    assert not names.unexpected_keys, names.unexpected_keys
    assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names.missing_keys), names.missing_keys


def _set_head_norms(layer: DecoderLayer, context_ND: Tensor) -> None:
    """Norm weights equal to the size queries and keys have without a norm, so that scores start at the same scale."""
    attention = layer.self_attn
    heads_NHE = attention.qkv_proj(context_ND).unflatten(-1, (-1, attention.head_dim))
    queries, keys = heads_NHE[:, : attention.num_heads], heads_NHE[:, attention.num_heads : -attention.num_kv_heads]
    for norm, vectors in ((attention.q_norm, queries), (attention.k_norm, keys)):
        assert isinstance(norm.weight, Tensor)
        norm.weight.fill_(float(vectors.pow(2).mean().sqrt()))


def bigram_factors(store: TokenStore, draft_to_target_W: Tensor, vocab_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """[V, r] and [W, r] whose product approximates log(p(next | previous) / p(next)) up to a constant per row.

    With smoothing towards the unigram distribution the row constant is all an unseen pair has, so the matrix that is
    factored, log(1 + count / (smoothing * unigram)), is sparse. Errors are weighted by the frequency of both tokens.
    """
    columns_V = torch.full((vocab_size,), -1)
    columns_V[draft_to_target_W] = torch.arange(draft_to_target_W.shape[0])
    tokens_N = store.tokens_C[: store.used].long()
    inside_N = store.answer_C[1 : store.used] > 0
    previous_X, next_X = tokens_N[:-1][inside_N], columns_V[tokens_N[1:][inside_N]]
    previous_X, next_X = previous_X[next_X >= 0], next_X[next_X >= 0]
    pairs_X, counts_X = torch.unique(previous_X * len(draft_to_target_W) + next_X, return_counts=True)
    row_X, column_X = pairs_X // len(draft_to_target_W), pairs_X % len(draft_to_target_W)
    total = max(int(counts_X.sum()), 1)
    unigram_W = (torch.bincount(next_X, minlength=len(draft_to_target_W)) + 1.0) / total
    value_X = torch.log1p(counts_X / (_SMOOTHING * unigram_W[column_X]))
    row_weight_V = (torch.bincount(previous_X, minlength=vocab_size) + 1.0).sqrt()
    column_weight_W = unigram_W.sqrt()
    weighted = torch.sparse_coo_tensor(
        torch.stack((row_X, column_X)),
        value_X * row_weight_V[row_X] * column_weight_W[column_X],
        (vocab_size, len(draft_to_target_W)),
        check_invariants=False,
    ).coalesce()
    left_Vr, scale_r, right_Wr = _largest_factors(weighted, min(rank, vocab_size, len(draft_to_target_W)))
    w1_Vr = torch.zeros(vocab_size, rank)
    w2_Wr = torch.zeros(len(draft_to_target_W), rank)
    w1_Vr[:, : len(scale_r)] = left_Vr * scale_r.sqrt() / row_weight_V[:, None]
    w2_Wr[:, : len(scale_r)] = right_Wr * scale_r.sqrt() / column_weight_W[:, None]
    balance = (w2_Wr.pow(2).mean() / w1_Vr.pow(2).mean().clamp(min=1e-12)).sqrt().sqrt()
    return w1_Vr * balance, w2_Wr / balance.clamp(min=1e-6)


def _largest_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated SVD of a sparse matrix by subspace iteration from a fixed start."""
    generator = torch.Generator().manual_seed(0)
    extra = min(rank + 8, *matrix.shape)
    basis = torch.linalg.qr(torch.sparse.mm(matrix, torch.randn(matrix.shape[1], extra, generator=generator))).Q
    for _ in range(6):
        other = torch.linalg.qr(torch.sparse.mm(matrix.t(), basis)).Q
        basis = torch.linalg.qr(torch.sparse.mm(matrix, other)).Q
    left, scale, right = torch.linalg.svd(torch.sparse.mm(matrix.t(), basis).T, full_matrices=False)
    return (basis @ left)[:, :rank], scale[:rank], right.T[:, :rank]
