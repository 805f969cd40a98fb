"""Compiled draft passes against the drafter with the same quantised products, and every row in every company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import fixtures
from tests.models.test_native_decoder import close, quantised_reference
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.layers.attention.interface import BlockMetadata, LayerKV
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.dspark import DSparkDrafter
from outrider.models.native_drafter import NativeDrafter
from outrider.models.source import LoadedModel, load_model
from outrider.ops.native_kernels import Kernels

PAGE = 16
CONTEXTS = (5, 0, 45)
ANCHORS = (7, 8, 9)
TABLES = torch.tensor([[4, 0, 0], [7, 0, 0], [2, 9, 1]], dtype=torch.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(fixtures.make_rand_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture
def build(target: LoadedModel, tmp_path: Path) -> Callable[..., DSparkDrafter]:
    def make(**changes: Any) -> DSparkDrafter:
        return load_drafter(
            fixtures.make_random_drafter(tmp_path / "drafter", **changes),
            target_config=target.config,
            embed_weight=target.model.embed_tokens.weight,
            lm_head_weight=target.model.lm_head.weight,
        ).model

    return make


def taps() -> Tensor:
    return torch.randn(max(CONTEXTS), 2 * fixtures.HIDDEN, generator=torch.Generator().manual_seed(3))


def run(
    drafter: DSparkDrafter | NativeDrafter,
    requests: Sequence[int] = (0, 1, 2),
    *,
    chunk: int = 1000,
    kv_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[LayerKV]]:
    """Hidden [R, W, D] of some requests and the pool; context is written ``chunk`` positions at a time."""
    shape = (10 * PAGE, fixtures.KV_HEADS, fixtures.HEAD_DIM)
    empty = torch.full(shape, torch.nan, dtype=kv_dtype)
    pool = [LayerKV(empty.clone(), empty.clone()) for _ in range(2)]
    for request in requests:
        for start in range(0, CONTEXTS[request], chunk):
            positions = torch.arange(start, min(start + chunk, CONTEXTS[request]))
            slots = TABLES[request].long()[positions // PAGE] * PAGE + positions % PAGE
            drafter.write_context(taps()[positions], positions, pool, slots)
    contexts = torch.tensor([CONTEXTS[request] for request in requests], dtype=torch.int32)
    metadata = BlockMetadata(
        context_lens_R=contexts,
        block_tables_RB=TABLES[list(requests)],
        kv_block_size=PAGE,
        block_width=drafter.config.block_width,
        max_context_len=int(contexts.max()),
    )
    anchors = torch.tensor([ANCHORS[request] for request in requests])
    experts = ExpertMetadata.single(len(requests) * drafter.config.block_width)
    with torch.inference_mode():
        return drafter.forward(anchors, contexts.long(), pool, metadata, experts), pool


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_block_and_head(kernels: Kernels, build: Callable[..., DSparkDrafter], sample_from_anchor: bool) -> None:
    drafter = build(**({} if sample_from_anchor else {"sample_from_anchor": False}))
    native = NativeDrafter.of(kernels, drafter)
    hidden, pool = run(native)
    logits = native.compute_base_logits(hidden.flatten(0, 1))
    reference = quantised_reference(kernels, drafter, "int8")
    expected, expected_pool = run(reference)
    close(hidden, expected)
    close(logits, reference.compute_base_logits(expected.flatten(0, 1)))
    for found, wanted in zip(pool, expected_pool, strict=True):
        assert torch.equal(found.key_SHD.isnan(), wanted.key_SHD.isnan())  # the same slots, no others
        written = ~wanted.key_SHD.isnan().any(dim=-1).any(dim=-1)
        close(found.key_SHD[written].flatten(1), wanted.key_SHD[written].flatten(1))
        close(found.value_SHD[written].flatten(1), wanted.value_SHD[written].flatten(1))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_sequential_head_is_the_module_s(kernels: Kernels, build: Callable[..., DSparkDrafter], head: str) -> None:
    drafter = build(markov_head_type=head)
    native = NativeDrafter.of(kernels, drafter)
    hidden = torch.randn(3, fixtures.HIDDEN, generator=torch.Generator().manual_seed(4))
    previous = torch.tensor(ANCHORS)
    state, expected_state = native.markov_state(3), drafter.markov_state(3)
    for _ in range(2):
        bias, state = native.markov_bias(previous, hidden, state)
        expected, expected_state = drafter.markov_bias(previous, hidden, expected_state)
        close(bias, expected)
        assert torch.equal(state, expected_state)
        assert torch.equal(native.confidence_logits(hidden, previous), drafter.confidence_logits(hidden, previous))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_bitwise_the_same_in_any_company(
    kv_dtype: torch.dtype, both_kernels: Kernels, build: Callable[..., DSparkDrafter]
) -> None:
    native = NativeDrafter.of(both_kernels, build())
    alone = [run(native, (request,), kv_dtype=kv_dtype)[0][0] for request in range(3)]
    for requests in ((0, 1, 2), (2, 0), (1, 2, 0), (0, 0), (2, 1, 0, 0, 1, 2, 0, 1)):
        for chunk in (1, 7, 1000):
            hidden, _ = run(native, requests, chunk=chunk, kv_dtype=kv_dtype)
            for row, request in zip(hidden, requests, strict=True):
                assert torch.equal(row, alone[request]), (requests, chunk, request)


def test_a_bf16_pool_costs_its_rounding_alone(both_kernels: Kernels, build: Callable[..., DSparkDrafter]) -> None:
    native = NativeDrafter.of(both_kernels, build())
    rounded, exact = (run(native, kv_dtype=dtype)[0] for dtype in (torch.bfloat16, torch.float32))
    error = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0.0 < float(error.mean()) < 0.05
