"""The static back end where the reference has no choice to make: bounds of a tier, padding, calls, the pool."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.layers.attention import static
from outrider.layers.attention.interface import AttentionBackend, BlockMetadata, CausalMetadata, LayerKV
from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.attention.static import StaticAttention

SIZE, COLUMNS = 4, 16  # of a block, of a block table: a context limit of 64
WIDTH = 5  # rows per request of a tier
SHAPES = [(6, 2, 8), (4, 4, 6), (8, 1, 10), (3, 3, 2), (9, 3, 20)]  # query heads, key heads, head dimension


def pool(kv_heads: int, head_dim: int, tables_RB: Tensor, lengths: list[int]) -> LayerKV:
    """NaN but where a position of a request lies. Block 0, which padding's tables name, is nobody's."""
    generator = torch.Generator().manual_seed(7)
    shape = ((1 + tables_RB.numel()) * SIZE, kv_heads, head_dim)
    kv = LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    for table_B, length in zip(tables_RB.tolist(), lengths, strict=False):
        slots = [table_B[p // SIZE] * SIZE + p % SIZE for p in range(length)]
        kv.key_SHD[slots] = torch.randn(length, kv_heads, head_dim, generator=generator)
        kv.value_SHD[slots] = torch.randn(length, kv_heads, head_dim, generator=generator)
    return kv


def scattered(requests: int, lengths: list[int]) -> Tensor:
    """Block tables as a builder makes them: zeros beyond what a request's length reaches."""
    order = torch.randperm(requests * COLUMNS, generator=torch.Generator().manual_seed(3)) + 1
    tables_RB = order.view(requests, COLUMNS).to(torch.int32)
    reached_R = torch.tensor([-(-length // SIZE) for length in lengths])
    return tables_RB.where(torch.arange(COLUMNS) < reached_R[:, None], 0)


def tier(widths: list[int], lengths: list[int], requests: int) -> CausalMetadata:
    """Ragged rows in a tier of ``requests``, padding requests and padding rows last."""
    fill = requests - len(widths)
    starts = [0]
    for width in widths + [0] * fill:
        starts.append(starts[-1] + width)
    tables_RB = scattered(requests, lengths + [0] * fill)
    slots = [
        int(tables_RB[r, p // SIZE]) * SIZE + p % SIZE
        for r, (width, length) in enumerate(zip(widths, lengths, strict=True))
        for p in range(length - width, length)
    ]
    return CausalMetadata(
        query_start_loc_R1=torch.tensor(starts, dtype=torch.int32),
        seq_lens_R=torch.tensor(lengths + [0] * fill, dtype=torch.int32),
        block_tables_RB=tables_RB,
        slot_mapping_N=torch.tensor(slots + [-1] * (requests * WIDTH - len(slots))),
        kv_block_size=SIZE,
        max_query_len=WIDTH,
        max_seq_len=SIZE * COLUMNS,
    )


@pytest.fixture(params=["one call", "several calls", "a request a call"])
def _calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = {"one call": 1 << 16, "several calls": 200, "a request a call": 1}[request.param]
    monkeypatch.setattr(static, "_CALL_POSITIONS", positions)


@pytest.mark.usefixtures("_calls")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_random_tiers_give_the_references_rows(heads: int, kv_heads: int, head_dim: int) -> None:
    """First chunks and later ones, decode windows, padding rows of NaN, a pool of NaN around what is written."""
    draw = random.Random(heads * head_dim)
    for case in range(6):
        requests = draw.randint(1, 7)
        real = draw.randint(0, requests)
        widths = [draw.randint(1, WIDTH) for _ in range(real)]
        lengths = [draw.choice((width, draw.randint(width, SIZE * COLUMNS))) for width in widths]
        metadata = tier(widths, lengths, requests)
        query = torch.randn(requests * WIDTH, heads, head_dim, generator=torch.Generator().manual_seed(case))
        query[sum(widths) :] = torch.nan
        kv = pool(kv_heads, head_dim, metadata.block_tables_RB, lengths)
        expected = ReferenceAttention().causal(query, kv, metadata, scale=0.4)
        found = StaticAttention().causal(query, kv, metadata, scale=0.4)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[sum(widths) :], torch.zeros_like(query[sum(widths) :]))


@pytest.mark.usefixtures("_calls")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_random_blocks_give_the_references_rows(heads: int, kv_heads: int, head_dim: int) -> None:
    draw = random.Random(heads * head_dim + 1)
    for case in range(6):
        requests = draw.randint(1, 7)
        contexts = [draw.choice((0, draw.randint(1, SIZE * COLUMNS))) for _ in range(requests)]
        metadata = BlockMetadata(
            context_lens_R=torch.tensor(contexts, dtype=torch.int32),
            block_tables_RB=scattered(requests, contexts),
            kv_block_size=SIZE,
            block_width=WIDTH,
            max_context_len=SIZE * COLUMNS,
        )
        generator = torch.Generator().manual_seed(case)
        query = torch.randn(requests * WIDTH, heads, head_dim, generator=generator)
        key, value = (torch.randn(requests * WIDTH, kv_heads, head_dim, generator=generator) for _ in range(2))
        kv = pool(kv_heads, head_dim, metadata.block_tables_RB, contexts)
        both: list[AttentionBackend] = [ReferenceAttention(), StaticAttention()]
        expected, found = (b.block(query, kv, metadata, key_NHD=key, value_NHD=value, scale=0.4) for b in both)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_chunk_after_others_sees_all_of_them() -> None:
    """A prompt in chunks of 7, 16 and 9 gives the rows of the prompt at once."""
    whole = replace(tier([3], [32], 1), query_start_loc_R1=torch.tensor([0, 32]), max_query_len=32, max_seq_len=32)
    query = torch.randn(32, 6, 8, generator=torch.Generator().manual_seed(1))
    kv = pool(2, 8, whole.block_tables_RB, [32])
    expected = ReferenceAttention().causal(query, kv, whole, scale=0.4)
    chunks, start = [], 0
    for rows in (7, 16, 9):
        chunk = replace(
            whole,
            query_start_loc_R1=torch.tensor([0, rows]),
            seq_lens_R=torch.tensor([start + rows]),
            max_query_len=rows,
            max_seq_len=start + rows,
        )
        chunks.append(StaticAttention().causal(query[start : start + rows], kv, chunk, scale=0.4))
        start += rows
    torch.testing.assert_close(torch.cat(chunks), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1], [-1, 6, -1, 0, -1], [3, 2, -1]])
def test_padding_rows_are_never_written(slots: list[int]) -> None:
    """Neither to slot 0, nor to a slot of others; what padding rows carry, NaN here, goes nowhere."""
    generator = torch.Generator().manual_seed(2)
    kv = LayerKV(torch.randn(8, 2, 4, generator=generator), torch.randn(8, 2, 4, generator=generator))
    kv.key_SHD[0] = torch.nan  # a value that must come back bit for bit
    key, value = (torch.randn(len(slots), 2, 4, generator=generator) for _ in range(2))
    expected_key, expected_value = kv.key_SHD.clone(), kv.value_SHD.clone()
    for row, slot in enumerate(slots):
        if slot < 0:
            key[row] = value[row] = torch.nan
        else:
            expected_key[slot], expected_value[slot] = key[row], value[row]
    StaticAttention().write_kv(kv, key_NHD=key, value_NHD=value, slot_mapping_N=torch.tensor(slots, dtype=torch.int64))
    torch.testing.assert_close(kv.key_SHD, expected_key, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(kv.value_SHD, expected_value, rtol=0, atol=0, equal_nan=True)
