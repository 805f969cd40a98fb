"""The drafter against the dense reference, its training pass against the paged one, and who may see what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fixtures import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    MARKOV_RANK,
    VOCAB,
    make_rand_target,
    make_random_drafter,
)
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.layers.attention.interface import BlockMetadata, LayerKV
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.dspark import DSparkDrafter
from outrider.models.source import LoadedModel, load_model

_PAGE = 16
_FEATURES = 2 * HIDDEN
_CONTEXTS = (5, 0, 33)  # the context of each request, in positions
_ANCHORS = (7, 8, 9)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Path) -> LoadedModel:
    return load_model(str(target_path))


@pytest.fixture
def build(target: LoadedModel, tmp_path: Path) -> Callable[..., DSparkDrafter]:
    def make(dtype: str = "float32", **changes: Any) -> DSparkDrafter:
        path = make_random_drafter(tmp_path / "drafter", **changes)
        return load_drafter(
            path,
            target_config=target.config,
            embed_weight=target.model.embed_tokens.weight,
            lm_head_weight=target.model.lm_head.weight,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
        ).model

    return make


def _features(seed: int = 0) -> Tensor:
    return torch.randn(max(_CONTEXTS), _FEATURES, generator=torch.Generator().manual_seed(seed))


def _paged(drafter: DSparkDrafter, taps_PF: Tensor) -> Tensor:
    """Hidden [3, W, D] of three requests with scattered pages; request r's context is the first rows of ``taps_PF``."""
    dtype = drafter.fc.weight.dtype
    kv = [LayerKV(*(torch.full((10 * _PAGE, KV_HEADS, HEAD_DIM), 9.0, dtype=dtype) for _ in "kv")) for _ in range(2)]
    tables = torch.tensor([[4, 0, 0], [7, 0, 0], [2, 9, 1]], dtype=torch.int32)
    for table, context in zip(tables, _CONTEXTS, strict=True):
        positions = torch.arange(context)
        slots = table.long()[positions // _PAGE] * _PAGE + positions % _PAGE
        drafter.write_context(taps_PF[:context], positions, kv, slots)
    metadata = BlockMetadata(
        context_lens_R=torch.tensor(_CONTEXTS, dtype=torch.int32),
        block_tables_RB=tables,
        kv_block_size=_PAGE,
        block_width=drafter.config.block_width,
        max_context_len=max(_CONTEXTS),
    )
    experts = ExpertMetadata.single(len(_CONTEXTS) * drafter.config.block_width)
    return drafter.forward(torch.tensor(_ANCHORS), torch.tensor(_CONTEXTS), kv, metadata, experts)


def _packed(drafter: DSparkDrafter, taps_PF: Tensor) -> Tensor:
    """The same three anchors over one sequence, through the training pass."""
    positions, anchors = torch.arange(len(taps_PF))[None], torch.tensor([_CONTEXTS])
    visible = positions[:, None, :] < anchors[:, :, None]
    return drafter.forward_packed(taps_PF[None], positions, torch.tensor([_ANCHORS]), anchors, visible)[0]


def test_paged_pass_equals_dense_reference(
    build: Callable[..., DSparkDrafter], tmp_path: Path, target_path: Path
) -> None:
    drafter, taps = build(), _features()
    reference = ReferenceDrafter.load(tmp_path / "drafter", ReferenceTarget(target_path))
    hidden = _paged(drafter, taps)
    for request, (context, anchor) in enumerate(zip(_CONTEXTS, _ANCHORS, strict=True)):
        torch.testing.assert_close(hidden[request], reference.hidden(taps[:context], anchor), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_training_pass_equals_paged_pass(build: Callable[..., DSparkDrafter], sample_from_anchor: bool) -> None:
    changes = {} if sample_from_anchor else {"sample_from_anchor": False}
    drafter, taps = build(**changes), _features()
    assert drafter.slot_offset == (0 if sample_from_anchor else 1)
    assert drafter.config.block_width == 7
    assert drafter.config.num_speculative_tokens == 7 - drafter.slot_offset
    torch.testing.assert_close(_packed(drafter, taps), _paged(drafter, taps), rtol=1e-4, atol=1e-4)


def test_an_anchor_of_many_in_a_training_pass_is_what_it_is_alone(build: Callable[..., DSparkDrafter]) -> None:
    """More anchors than one call of attention takes, and a first one that sees no context at all."""
    drafter, generator = build(), torch.Generator().manual_seed(4)
    taps = torch.randn(2, 50, _FEATURES, generator=generator)
    positions = torch.arange(50).expand(2, -1)
    ids = torch.randint(0, VOCAB, (2, 41), generator=generator)
    anchors = torch.stack((torch.arange(41), torch.arange(41) + 9))
    visible = positions[:, None, :] < anchors[:, :, None]
    together = drafter.forward_packed(taps, positions, ids, anchors, visible)
    for bin_, anchor in ((0, 0), (0, 17), (0, 18), (0, 40), (1, 0), (1, 19), (1, 40)):
        one = (slice(bin_, bin_ + 1), slice(anchor, anchor + 1))
        alone = drafter.forward_packed(taps[one[0]], positions[one[0]], ids[one], anchors[one], visible[one])
        torch.testing.assert_close(together[bin_, anchor], alone[0, 0], rtol=1e-4, atol=1e-4)


def test_slots_see_context_below_the_anchor_and_their_own_block(build: Callable[..., DSparkDrafter]) -> None:
    drafter, taps = build(), _features()
    before = _packed(drafter, taps)
    at_anchor = taps.clone()
    at_anchor[_CONTEXTS[0] :] += 1.0  # the first request's anchor position and everything behind it
    after = _packed(drafter, at_anchor)
    torch.testing.assert_close(after[0], before[0])
    assert (after[2] - before[2]).abs().amax() > 1e-3  # the third request does see these rows
    last = taps.clone()
    last[_CONTEXTS[0] - 1] += 1.0
    changed = (_packed(drafter, last)[0] - before[0]).abs().amax(-1)
    assert (changed > 1e-4).all()
    # both ways inside the block: another anchor (row 0) reaches all rows, and a longer block (more masks) reaches row 0
    positions = torch.arange(len(taps))[None]
    visible = positions[:, None, :] < torch.tensor([[5]])[:, :, None]
    one = [
        drafter.forward_packed(taps[None], positions, torch.tensor([[t]]), torch.tensor([[5]]), visible) for t in (7, 8)
    ]
    assert ((one[0] - one[1]).abs().amax(-1) > 1e-4).all()
    shorter = build(block_size=3)
    short = shorter.forward_packed(taps[None], positions, torch.tensor([[7]]), torch.tensor([[5]]), visible)
    assert (short[0, 0, 0] - one[0][0, 0, 0]).abs().amax() > 1e-4


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_markov_bias_is_the_formula(build: Callable[..., DSparkDrafter], head_type: str) -> None:
    drafter = build(markov_head_type=head_type)
    weights = {name: tensor.double() for name, tensor in drafter.named_parameters() if name.startswith("markov_head")}
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    hidden_RGD = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    state = drafter.markov_state(2)
    memory = torch.zeros(2, MARKOV_RANK, dtype=torch.float64)
    for slot, previous in enumerate(torch.tensor([[3, 4], [5, 6], [7, 8]])):
        bias, state = drafter.markov_bias(previous, hidden_RGD[:, slot], state)
        assert bias.dtype == torch.float32
        e, h = w1[previous], hidden_RGD[:, slot].double()
        if head_type == "gated":
            e = e / (1 + torch.exp(-(torch.cat((h, e), 1) @ weights["markov_head.gate_proj.weight"].T
                                      + weights["markov_head.gate_proj.bias"])))  # fmt: skip
        elif head_type == "rnn":
            z = torch.cat((memory, e, h), 1) @ weights["markov_head.joint_proj.weight"].T
            z = z + weights["markov_head.joint_proj.bias"]
            gate, candidate, out = z[:, :MARKOV_RANK], z[:, MARKOV_RANK : 2 * MARKOV_RANK], z[:, 2 * MARKOV_RANK :]
            g = 1 / (1 + torch.exp(-gate))
            memory = g * memory + (1 - g) * torch.tanh(candidate)
            e = torch.tanh(out)
        torch.testing.assert_close(bias.double(), e @ w2.T, rtol=1e-4, atol=1e-4)


def test_confidence_reads_hidden_and_previous_token(build: Callable[..., DSparkDrafter]) -> None:
    hidden, previous = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2)), torch.tensor([1, 2, 3, 4])
    for with_markov in (True, False):
        drafter = build(confidence_head_with_markov=with_markov)
        assert drafter.confidence_head is not None
        assert drafter.markov_head is not None
        inputs = hidden
        if with_markov:
            inputs = torch.cat((hidden, drafter.markov_head.markov_w1.weight[previous]), dim=1)
        expected = inputs @ drafter.confidence_head.proj.weight[0] + 0.5
        torch.testing.assert_close(drafter.confidence_logits(hidden, previous), expected)


def test_confidence_does_not_depend_on_other_rows(build: Callable[..., DSparkDrafter]) -> None:
    drafter = build(enable_confidence_head=True, confidence_head_with_markov=True)
    hidden_RD = torch.randn(13, drafter.config.decoder.hidden_size, generator=torch.Generator().manual_seed(7))
    ids_R = torch.arange(13)
    together_R = drafter.confidence_logits(hidden_RD, ids_R)
    for r in range(13):
        assert torch.equal(drafter.confidence_logits(hidden_RD[r : r + 1], ids_R[r : r + 1])[0], together_R[r])


def test_without_markov_head_the_bias_is_zero(build: Callable[..., DSparkDrafter]) -> None:
    drafter = build(markov_rank=0, confidence_head_with_markov=False)
    bias, state = drafter.markov_bias(torch.tensor([1, 2]), torch.ones(2, HIDDEN), drafter.markov_state(2))
    assert torch.equal(bias, torch.zeros(2, VOCAB))
    assert state.shape == (2, 0)


def test_bfloat16_is_close(build: Callable[..., DSparkDrafter]) -> None:
    taps = _features()
    high, low = _paged(build(), taps), _paged(build("bfloat16"), taps)
    assert low.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(high.flatten(), low.float().flatten(), dim=0) > 0.995


def test_reduced_vocabulary_keeps_chosen_rows(target: LoadedModel, build: Callable[..., DSparkDrafter]) -> None:
    full = build()
    ids = torch.tensor([3, 9, 40])
    config = replace(full.config, draft_vocab_size=3)
    head = nn.Parameter(target.model.lm_head.weight[ids])
    small = DSparkDrafter(
        config,
        embedding_VD=target.model.embed_tokens.weight,
        lm_head_VD=head,
        draft_to_target_V=ids,
        backend=full.backend,
    )
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(small.compute_base_logits(hidden), full.compute_base_logits(hidden)[:, ids])
    assert torch.equal(small.draft_to_target_V, ids)
    assert torch.equal(full.draft_to_target_V, torch.arange(VOCAB))
