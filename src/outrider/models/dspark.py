"""The DSpark drafter: one parallel pass over a block of slots, then a light head that walks them one by one.

A round's block starts with the anchor (the last emitted token, at position p, never run through the target) followed
by mask tokens. Every slot sees the projected target features of all positions < p, strictly, and all slots of its own
block in both directions. With ``sample_from_anchor`` slot k predicts token p + 1 + k and the block has gamma rows;
without it, masks sit at the positions they predict, row 0 predicts nothing, and ``slot_offset`` is 1.

The context is projected once (``fc``, ``hidden_norm``) and shared by all layers, each of which makes its keys and
values from it with the projections it also uses for block rows. Context passes neither the layers' norms nor the
layers. Embedding and LM head are the target's own parameters; with a reduced draft vocabulary the head keeps some rows
and ``draft_to_target_V`` says which target id each draft id is.

Every rank holds the whole drafter but for experts in its layers, which are spread as the target's: a draft pass of a
dense drafter needs no other rank.

Parameter names are DeepSpec's, but for the merged projections (see ``layers.checkpoint.checkpoint_views``).

Shape legend: N context rows, R requests, W block width, D hidden size, F tapped width, Vd draft vocabulary, r Markov
rank, K rows that need logits, Hq/Hkv heads, E head dimension; in training B bins, C context rows of a bin, A anchors
of a bin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import DrafterConfig
from outrider.errors import ConfigError
from outrider.layers.attention.interface import AttentionBackend, BlockMetadata, LayerKV
from outrider.layers.embedding import Embedding, LMHead
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import RotaryEmbedding, RotaryPhase
from outrider.models.decoder import DecoderLayer
from outrider.ops.compiled_head import CompiledHead
from outrider.parallel.communicator import SingleRankCommunicator
from outrider.parallel.state import SINGLE_RANK, ParallelState

_PACKED_ANCHORS = 18  # of each bin, in one call of attention; training
_PACKED_STEP = 16  # context rows of such a call are a multiple of this: fewer sizes to set up products for


class MarkovHead(nn.Module):
    """A bias over the draft vocabulary from the token before (and, but for ``vanilla``, the slot's hidden state)."""

    def __init__(self, config: DrafterConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.decoder.hidden_size
        self.rank, self.head_type = rank, config.markov_head_type
        self.markov_w1 = Embedding(config.decoder.vocab_size, rank, dtype=dtype, device=device)
        self.markov_w2 = Linear(rank, config.draft_vocab_size, bias=False, dtype=dtype, device=device)
        if self.head_type == "gated":
            self.gate_proj = Linear(hidden + rank, rank, bias=True, dtype=dtype, device=device)
        elif self.head_type == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank, bias=True, dtype=dtype, device=device)

    def features(self, prev_ids_R: Tensor, hidden_RD: Tensor, state_Rr: Tensor) -> tuple[Tensor, Tensor]:
        """What ``markov_w2`` turns into the bias, [R, r], and the next state."""
        embedded_Rr = self.markov_w1(prev_ids_R)
        if self.head_type == "gated":
            gate_Rr = torch.sigmoid(self.gate_proj(torch.cat((hidden_RD, embedded_Rr), dim=-1)))
            return gate_Rr * embedded_Rr, state_Rr
        if self.head_type == "rnn":
            joint_RX = self.joint_proj(torch.cat((state_Rr, embedded_Rr, hidden_RD), dim=-1))
            gate_Rr, candidate_Rr, output_Rr = joint_RX.chunk(3, dim=-1)
            gate_Rr = torch.sigmoid(gate_Rr)
            return torch.tanh(output_Rr), gate_Rr * state_Rr + (1 - gate_Rr) * torch.tanh(candidate_Rr)
        return embedded_Rr, state_Rr


class ConfidenceHead(nn.Module):
    """One logit a slot: will the draft of this slot be accepted, given that those before it were?"""

    def __init__(self, config: DrafterConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        width = config.decoder.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.proj = Linear(width, 1, bias=True, dtype=dtype, device=device)

    def forward(self, features_RX: Tensor) -> Tensor:
        """fp32 [R], computed in fp32 whatever the weights' dtype: it decides how much is verified. No matrix product:
        its last bit may depend on the other rows."""
        bias = self.proj.bias
        assert bias is not None
        return (features_RX.float() * self.proj.weight[0].float()).sum(dim=-1) + bias.float()


class DSparkDrafter(nn.Module):
    """A ``DrafterModel``. Its own parameters are created uninitialised, for a loader or a trainer to fill."""

    draft_to_target_V: Tensor  # int64 [Vd]
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    compiled_head: CompiledHead | None = None  # its modules walk

    def __init__(
        self,
        config: DrafterConfig,
        *,
        embedding_VD: nn.Parameter,
        lm_head_VD: nn.Parameter,
        draft_to_target_V: Tensor,
        backend: AttentionBackend,
        parallel: ParallelState = SINGLE_RANK,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """``lm_head_VD`` has one row per draft id: the target's head itself, or its rows at ``draft_to_target_V``."""
        super().__init__()
        decoder = config.decoder
        assert embedding_VD.shape == (decoder.vocab_size, decoder.hidden_size), tuple(embedding_VD.shape)
        assert lm_head_VD.shape == (config.draft_vocab_size, decoder.hidden_size), tuple(lm_head_VD.shape)
        assert draft_to_target_V.shape == (config.draft_vocab_size,), tuple(draft_to_target_V.shape)
        self.config = config
        self.backend = backend
        alone = SingleRankCommunicator()
        self.slot_offset = 0 if config.sample_from_anchor else 1  # first row of a block that predicts something
        hidden, eps, taps = decoder.hidden_size, decoder.rms_norm_eps, len(config.target_layer_ids)
        self.embed_tokens = Embedding(0, hidden, dtype=dtype, device=device)
        self.embed_tokens.weight = embedding_VD
        self.lm_head = LMHead(lm_head_VD, vocab_size=config.draft_vocab_size, tp=alone)
        self.fc = Linear(taps * hidden, hidden, bias=False, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(decoder, layer_index=i, parallel=parallel, tp=alone, dtype=dtype, device=device)
            for i in range(decoder.num_layers)
        )
        self.norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.markov_head = MarkovHead(config, dtype=dtype, device=device) if config.markov_rank else None
        self.confidence_head = (
            ConfidenceHead(config, dtype=dtype, device=device) if config.enable_confidence_head else None
        )
        self.register_buffer("draft_to_target_V", draft_to_target_V.to(device, torch.int64), persistent=False)
        self.rotary = RotaryEmbedding(
            decoder.rope,
            head_dim=decoder.head_dim,
            max_position_embeddings=decoder.max_position_embeddings,
            device=device,
        )

    @property
    def crosses_dp_ranks(self) -> bool:
        return self.config.decoder.has_experts

    def _draft_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    # The parallel pass.

    def project_context(self, taps_NF: Tensor) -> Tensor:
        """[N, D], what every layer makes its context keys and values from."""
        context_ND: Tensor = self.hidden_norm(self.fc(taps_NF.to(self.fc.weight.dtype)))
        return context_ND

    def write_context(
        self,
        taps_NF: Tensor,
        positions_N: Tensor,
        kv_caches: Sequence[LayerKV],
        slot_mapping_N: Tensor,
    ) -> None:
        """Store every layer's keys and values of committed positions; rows with slot -1 are skipped."""
        assert len(kv_caches) == len(self.layers), f"{len(kv_caches)} caches for {len(self.layers)} draft layers"
        context_ND, phase = self.project_context(taps_NF), self.rotary(positions_N)
        for layer, kv in zip(self._draft_layers(), kv_caches, strict=True):
            key, value = layer.self_attn.key_value(context_ND, phase)
            self.backend.write_kv(kv, key_NHD=key, value_NHD=value, slot_mapping_N=slot_mapping_N)

    def forward(
        self,
        anchor_ids_R: Tensor,
        anchor_positions_R: Tensor,
        kv_caches: Sequence[LayerKV],
        metadata: BlockMetadata,
        experts: ExpertMetadata,
    ) -> Tensor:
        """Hidden of every block row after the final norm: [R, W, D]."""
        width = self.config.block_width
        assert metadata.block_width == width, f"metadata is for blocks of {metadata.block_width} rows, not {width}"
        residual_ND, phase = self._embed_blocks(anchor_ids_R, anchor_positions_R)  # N = R * W here
        for layer, kv in zip(self._draft_layers(), kv_caches, strict=True):
            query, key, value = layer.self_attn.query_key_value(layer.input_layernorm(residual_ND), phase)
            attention = self.backend.block(
                query, kv, metadata, key_NHD=key, value_NHD=value, scale=layer.self_attn.scale
            )
            residual_ND = layer.add_mlp(residual_ND + layer.self_attn.output(attention), experts)
        hidden_ND: Tensor = self.norm(residual_ND)
        return hidden_ND.view(-1, width, hidden_ND.shape[-1])

    def forward_packed(
        self,
        taps_BCF: Tensor,
        positions_BC: Tensor,
        anchor_ids_BA: Tensor,
        anchor_positions_BA: Tensor,
        visible_BAC: Tensor,
    ) -> Tensor:
        """The training pass: many anchors over packed context, no pool. [B, A, W, D].

        visible_BAC says which context rows each anchor may see: those of its own sequence at positions below its own.
        """
        if self.config.decoder.moe is not None:
            raise ConfigError(
                "training runs dense drafters only; this one has expert layers (num_experts="
                f"{self.config.decoder.moe.num_experts})"
            )
        bins, context = positions_BC.shape
        anchors, width = anchor_ids_BA.shape[1], self.config.block_width
        context_ND = self.project_context(taps_BCF.flatten(0, 1))
        context_phase = self.rotary(positions_BC.flatten())
        residual_ND, phase = self._embed_blocks(anchor_ids_BA.flatten(), anchor_positions_BA.flatten())
        parts = _packed_parts(visible_BAC, width=width)
        experts = ExpertMetadata.single(residual_ND.shape[0])
        for layer in self._draft_layers():
            projections = layer.self_attn
            query, key, value = projections.query_key_value(layer.input_layernorm(residual_ND), phase)
            context_key, context_value = projections.key_value(context_ND, context_phase)
            attention = _packed_attention(
                query.view(bins, anchors, width, *query.shape[1:]),
                block_key=key.view(bins, anchors, width, *key.shape[1:]),
                block_value=value.view(bins, anchors, width, *value.shape[1:]),
                context_key=context_key.view(bins, context, *context_key.shape[1:]),
                context_value=context_value.view(bins, context, *context_value.shape[1:]),
                parts=parts,
                scale=projections.scale,
            )
            residual_ND = layer.add_mlp(residual_ND + projections.output(attention.flatten(0, 2)), experts)
        hidden_ND: Tensor = self.norm(residual_ND)
        return hidden_ND.view(bins, anchors, width, -1)

    def _embed_blocks(self, anchor_ids_R: Tensor, anchor_positions_R: Tensor) -> tuple[Tensor, RotaryPhase]:
        """Residual stream [R * W, D] and rotary phase of the blocks [anchor, mask, ...] at p, p + 1, ..."""
        width = self.config.block_width
        masks_RX = anchor_ids_R.new_full((anchor_ids_R.shape[0], width - 1), self.config.mask_token_id)
        block_ids_RW = torch.cat((anchor_ids_R[:, None], masks_RX), dim=1)
        offsets_W = torch.arange(width, device=anchor_positions_R.device)
        positions_RW = anchor_positions_R[:, None] + offsets_W
        residual_ND: Tensor = self.embed_tokens(block_ids_RW.flatten())
        return residual_ND.to(self.fc.weight.dtype), self.rotary(positions_RW.flatten())

    def compute_base_logits(self, hidden_KD: Tensor) -> Tensor:
        """fp32 [K, Vd], without the Markov bias."""
        logits_KV: Tensor = self.lm_head(hidden_KD)
        return logits_KV

    # The sequential head: one call per slot, in order. prev_ids are target ids; the first is the anchor.

    def markov_state(self, num_requests: int) -> Tensor:
        """The state before the first slot, [R, r]; only the rnn head changes it."""
        return self.fc.weight.new_zeros(num_requests, self.config.markov_rank)

    def markov_features(self, prev_ids_R: Tensor, hidden_RD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What ``markov_w2`` multiplies, [R, r] (r = 0 without a head), and the next state."""
        if self.markov_head is None:
            return state, state
        features_Rr, state = self.markov_head.features(prev_ids_R, hidden_RD, state)
        return features_Rr, state

    def markov_bias(self, prev_ids_R: Tensor, hidden_RD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 bias [R, Vd] to the slot's base logits, and the next state."""
        if self.markov_head is None:
            return hidden_RD.new_zeros((hidden_RD.shape[0], self.config.draft_vocab_size), dtype=torch.float32), state
        features_Rr, state = self.markov_features(prev_ids_R, hidden_RD, state)
        bias_RV: Tensor = self.markov_head.markov_w2(features_Rr).float()
        return bias_RV, state

    def confidence_logits(self, hidden_RD: Tensor, prev_ids_R: Tensor) -> Tensor:
        """fp32 [R]; only for drafters with a confidence head."""
        assert self.confidence_head is not None, "this drafter has no confidence head"
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            hidden_RD = torch.cat((hidden_RD, self.markov_head.markov_w1(prev_ids_R)), dim=-1)
        logits_R: Tensor = self.confidence_head(hidden_RD)
        return logits_R


class _PackedPart(NamedTuple):
    """Neighbouring anchors of every bin, and what their rows may see."""

    first: int  # anchors first..stop
    stop: int
    seen: int  # context rows 0..seen hold all that any of them sees
    mask_B1QT: Tensor  # bool, Q = (stop - first) * W query rows, T = seen + Q


def _packed_attention(
    query_BAWHE: Tensor,
    *,
    block_key: Tensor,  # [B, A, W, Hkv, E], as block_value
    block_value: Tensor,
    context_key: Tensor,  # [B, C, Hkv, E], as context_value
    context_value: Tensor,
    parts: Sequence[_PackedPart],
    scale: float,
) -> Tensor:
    """One softmax over the visible context and the own block: [B, A, W, Hq, E].

    Query heads that share a key head are folded into the query rows, so keys and values are never repeated.
    """
    bins, _, width, heads, size = query_BAWHE.shape
    kv_heads = context_key.shape[2]
    share = heads // kv_heads
    mixed_parts: list[Tensor] = []
    for first, stop, seen, mask_B1QT in parts:
        rows = (stop - first) * width
        query = query_BAWHE[:, first:stop].reshape(bins, rows, kv_heads, share, size).permute(0, 2, 3, 1, 4)
        key = torch.cat((context_key[:, :seen], block_key[:, first:stop].flatten(1, 2)), dim=1)
        value = torch.cat((context_value[:, :seen], block_value[:, first:stop].flatten(1, 2)), dim=1)
        mixed = F.scaled_dot_product_attention(
            query.reshape(bins, kv_heads, share * rows, size),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask_B1QT.repeat(1, 1, share, 1),
            scale=scale,
        )
        mixed = mixed.view(bins, kv_heads, share, rows, size).permute(0, 3, 1, 2, 4)
        mixed_parts.append(mixed.reshape(bins, stop - first, width, heads, size))
    return torch.cat(mixed_parts, dim=1)


def _packed_parts(visible_BAC: Tensor, *, width: int) -> list[_PackedPart]:
    """An anchor's rows see its context and one another.

    In parts, since rows of one part are compared with all blocks of it and with all context that it sees, most of it
    in vain: the fewer anchors, the less of that.
    """
    bins, anchors, _ = visible_BAC.shape
    parts: list[_PackedPart] = []
    for first in range(0, anchors, _PACKED_ANCHORS):
        stop = min(first + _PACKED_ANCHORS, anchors)
        visible_BPC = visible_BAC[:, first:stop]
        seen_X = visible_BPC.flatten(0, 1).any(0).nonzero()[:, 0]
        seen = int(seen_X[-1]) + 1 if len(seen_X) else 0
        seen = min(-(-seen // _PACKED_STEP) * _PACKED_STEP, visible_BAC.shape[2])
        own_P = torch.arange(stop - first, device=visible_BAC.device).repeat_interleave(width)
        own_BQQ = (own_P[:, None] == own_P).expand(bins, -1, -1)
        context_BQC = visible_BPC[:, :, :seen].repeat_interleave(width, dim=1)
        parts.append(_PackedPart(first, stop, seen, torch.cat((context_BQC, own_BQQ), dim=-1)[:, None]))
    return parts
