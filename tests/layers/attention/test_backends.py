"""Every torch back end against attention written out as one dense masked softmax per request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.layers.attention.interface import AttentionBackend, BlockMetadata, CausalMetadata, LayerKV
from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.attention.registry import get_attention_backend
from outrider.layers.attention.static import StaticAttention

HEADS, KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, NUM_BLOCKS = 6, 2, 8, 4, 700
SCALE = 0.3


@pytest.fixture(params=["reference", "static"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return get_attention_backend(request.param)


def dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """query [L, Hq, D], key and value [T, Hkv, D], visible bool [L, T]; one head at a time."""
    out = torch.empty_like(query)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = (query[:, head].double() @ key[:, kv_head].double().T) * SCALE
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[:, head] = (weights @ value[:, kv_head].double()).to(out.dtype)
    return out


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan_pool(dtype: torch.dtype = torch.float32) -> LayerKV:
    shape = (NUM_BLOCKS * KV_BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return LayerKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))


def tables(requests: int, max_len: int) -> Tensor:
    columns = -(-max(max_len, 1) // KV_BLOCK_SIZE)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5))
    return order[: requests * columns].view(requests, columns).to(torch.int32)


def slots_of(table: Tensor, length: int) -> Tensor:
    return torch.tensor(
        [int(table[p // KV_BLOCK_SIZE]) * KV_BLOCK_SIZE + p % KV_BLOCK_SIZE for p in range(length)], dtype=torch.int64
    )


def causal_case(
    query_lens: list[int], seq_lens: list[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, LayerKV, CausalMetadata, Tensor]:
    """Query, filled pool, metadata and the expected output."""
    tables_RB = tables(len(seq_lens), max(seq_lens, default=0))
    kv = nan_pool(dtype)
    query = random(sum(query_lens), HEADS, HEAD_DIM, seed=1, dtype=dtype)
    starts, expected, new_slots = [0], [torch.empty(0, HEADS, HEAD_DIM, dtype=dtype)], []
    for request, (rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        key = random(length, KV_HEADS, HEAD_DIM, seed=100 + request, dtype=dtype)
        value = random(length, KV_HEADS, HEAD_DIM, seed=200 + request, dtype=dtype)
        slots = slots_of(tables_RB[request], length)
        kv.key_SHD[slots], kv.value_SHD[slots] = key, value
        visible = torch.arange(length)[None] <= torch.arange(length - rows, length)[:, None]
        expected.append(dense(query[starts[-1] : starts[-1] + rows], key, value, visible))
        new_slots += slots[length - rows :].tolist()
        starts.append(starts[-1] + rows)
    metadata = CausalMetadata(
        query_start_loc_R1=torch.tensor(starts, dtype=torch.int32),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables_RB=tables_RB,
        slot_mapping_N=torch.tensor(new_slots, dtype=torch.int64),
        kv_block_size=KV_BLOCK_SIZE,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
    )
    return query, kv, metadata, torch.cat(expected)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([17], [17]),
        ([1, 1, 1, 1], [3, 16, 17, 40]),
        ([5, 1, 3, 8], [5, 30, 33, 9]),
        ([2, 0, 4], [20, 0, 4]),  # a padding request in the middle
        ([150, 3], [170, 3]),  # a prefill that is cut
        ([1] * 24, [90 + request for request in range(24)]),  # more of one size than a call takes
        ([], []),
    ],
)
def test_causal_ragged_batches(query_lens: list[int], seq_lens: list[int], backend: AttentionBackend) -> None:
    query, kv, metadata, expected = causal_case(query_lens, seq_lens)
    out = backend.causal(query, kv, metadata, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_causal_bf16(backend: AttentionBackend) -> None:
    query, kv, metadata, expected = causal_case([4, 1], [20, 9], torch.bfloat16)
    out = backend.causal(query, kv, metadata, scale=SCALE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_causal_padding_rows_are_zero(backend: AttentionBackend) -> None:
    query, kv, metadata, expected = causal_case([3], [7])
    padded = torch.cat((query, torch.full((2, HEADS, HEAD_DIM), torch.nan)))
    out = backend.causal(padded, kv, metadata, scale=SCALE)
    torch.testing.assert_close(out[:3], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[3:], torch.zeros(2, HEADS, HEAD_DIM))


def test_causal_rows_do_not_depend_on_the_other_requests(backend: AttentionBackend) -> None:
    query, kv, metadata, _ = causal_case([5, 1, 3], [5, 30, 33])
    together = backend.causal(query, kv, metadata, scale=SCALE)
    alone_metadata = replace(
        metadata,
        query_start_loc_R1=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens_R=metadata.seq_lens_R[2:],
        block_tables_RB=metadata.block_tables_RB[2:],
        slot_mapping_N=metadata.slot_mapping_N[6:],
    )
    alone = backend.causal(query[6:], kv, alone_metadata, scale=SCALE)
    torch.testing.assert_close(together[6:], alone, rtol=1e-6, atol=1e-6)


def test_one_request_full_of_nan_leaves_the_others_alone(backend: AttentionBackend) -> None:
    query, kv, metadata, expected = causal_case([1, 1], [13, 15])
    kv.key_SHD[slots_of(metadata.block_tables_RB[0], 13)] = torch.nan
    out = backend.causal(query, kv, metadata, scale=SCALE)
    torch.testing.assert_close(out[1:], expected[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("bits", [torch.nan, torch.inf])
def test_a_position_that_is_not_finite_reaches_only_rows_that_see_it(
    backend: AttentionBackend, what: str, bits: float
) -> None:
    """Rows of a verify window: the anchor's must not notice what a draft behind it left in the pool."""
    query, kv, metadata, expected = causal_case([4, 2], [20, 9])
    pool = kv.key_SHD if what == "key" else kv.value_SHD
    pool[slots_of(metadata.block_tables_RB[0], 20)[18], 1] = bits
    out = backend.causal(query, kv, metadata, scale=SCALE)
    unaffected = [0, 1, 4, 5]  # rows 2 and 3 stand at positions 18 and 19
    torch.testing.assert_close(out[unaffected], expected[unaffected], rtol=1e-5, atol=1e-5)
    heads = slice(HEADS // KV_HEADS, 2 * (HEADS // KV_HEADS))  # those that share the second key head
    if what == "value" or bits != bits:  # an infinite key may as well take all weight away from itself
        assert not out[2:4, heads].isfinite().any()


def test_a_masked_key_whose_score_overflows_reaches_only_rows_that_see_it() -> None:
    """And rows of other requests keep their bits. Only the reference promises this: it looks at its result."""
    query, kv, metadata, expected = causal_case([4, 2], [20, 9])
    before = ReferenceAttention().causal(query, kv, metadata, scale=SCALE)
    kv.key_SHD[slots_of(metadata.block_tables_RB[0], 20)[19], 0] = torch.finfo(torch.float32).max
    out = ReferenceAttention().causal(query, kv, metadata, scale=SCALE)
    torch.testing.assert_close(out[:3], expected[:3], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[4:], before[4:])


def test_metadata_refreshed_in_place_is_noticed(backend: AttentionBackend) -> None:
    """A captured runner keeps one metadata object and rewrites its tensors."""
    query, kv, metadata, expected = causal_case([1, 1], [6, 11])
    swapped = replace(
        metadata,
        seq_lens_R=metadata.seq_lens_R.flip(0).clone(),
        block_tables_RB=metadata.block_tables_RB.flip(0).clone(),
    )
    backend.causal(query, kv, swapped, scale=SCALE)
    swapped.seq_lens_R.copy_(metadata.seq_lens_R)
    swapped.block_tables_RB.copy_(metadata.block_tables_RB)
    torch.testing.assert_close(backend.causal(query, kv, swapped, scale=SCALE), expected, rtol=1e-5, atol=1e-5)
    # The tables alone may change too: two requests of equal length trade places.
    query, kv, metadata, expected = causal_case([1, 1], [6, 6])
    swapped = replace(metadata, block_tables_RB=metadata.block_tables_RB.flip(0).clone())
    backend.causal(query, kv, swapped, scale=SCALE)
    swapped.block_tables_RB.copy_(metadata.block_tables_RB)
    torch.testing.assert_close(backend.causal(query, kv, swapped, scale=SCALE), expected, rtol=1e-5, atol=1e-5)


def test_write_kv_skips_padding_rows(backend: AttentionBackend) -> None:
    kv = LayerKV(torch.zeros(8, KV_HEADS, HEAD_DIM), torch.zeros(8, KV_HEADS, HEAD_DIM))
    key, value = random(4, KV_HEADS, HEAD_DIM, seed=1), random(4, KV_HEADS, HEAD_DIM, seed=2)
    slots = torch.tensor([5, -1, 0, -1])
    backend.write_kv(kv, key_NHD=key, value_NHD=value, slot_mapping_N=slots)
    expected_key, expected_value = torch.zeros_like(kv.key_SHD), torch.zeros_like(kv.value_SHD)
    expected_key[5], expected_key[0], expected_value[5], expected_value[0] = key[0], key[2], value[0], value[2]
    assert torch.equal(kv.key_SHD, expected_key)
    assert torch.equal(kv.value_SHD, expected_value)


def block_case(contexts: list[int], width: int) -> tuple[Tensor, Tensor, Tensor, LayerKV, BlockMetadata, Tensor]:
    """Query, block key, block value, pool, metadata, expected."""
    tables_RB = tables(len(contexts), max(contexts, default=0))
    rows = len(contexts) * width
    kv = nan_pool()
    query = random(rows, HEADS, HEAD_DIM, seed=1)
    key, value = random(rows, KV_HEADS, HEAD_DIM, seed=2), random(rows, KV_HEADS, HEAD_DIM, seed=3)
    expected = [torch.empty(0, HEADS, HEAD_DIM)]
    for request, context in enumerate(contexts):
        slots = slots_of(tables_RB[request], context)
        kv.key_SHD[slots] = random(context, KV_HEADS, HEAD_DIM, seed=100 + request)
        kv.value_SHD[slots] = random(context, KV_HEADS, HEAD_DIM, seed=200 + request)
        own = slice(request * width, (request + 1) * width)
        visible = torch.ones(width, context + width, dtype=torch.bool)
        expected.append(
            dense(
                query[own],
                torch.cat((kv.key_SHD[slots], key[own])),
                torch.cat((kv.value_SHD[slots], value[own])),
                visible,
            )
        )
    metadata = BlockMetadata(
        context_lens_R=torch.tensor(contexts, dtype=torch.int32),
        block_tables_RB=tables_RB,
        kv_block_size=KV_BLOCK_SIZE,
        block_width=width,
        max_context_len=max(contexts, default=0),
    )
    return query, key, value, kv, metadata, torch.cat(expected)


@pytest.mark.parametrize(("contexts", "width"), [([7], 1), ([0], 5), ([16, 0, 3, 40], 4), ([33, 34, 35], 7), ([], 3)])
def test_block_sees_its_context_and_all_of_itself(contexts: list[int], width: int, backend: AttentionBackend) -> None:
    query, key, value, kv, metadata, expected = block_case(contexts, width)
    out = backend.block(query, kv, metadata, key_NHD=key, value_NHD=value, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_block_leaves_the_pool_untouched_and_serves_both_kinds_of_pass(backend: AttentionBackend) -> None:
    query, key, value, kv, metadata, expected = block_case([9, 4], 3)
    before = kv.key_SHD.clone()
    causal_query, causal_kv, causal_metadata, causal_expected = causal_case([1, 2], [9, 4])
    for _ in range(2):  # the plan of one kind must not be taken for the other's
        out = backend.block(query, kv, metadata, key_NHD=key, value_NHD=value, scale=SCALE)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        causal_out = backend.causal(causal_query, causal_kv, causal_metadata, scale=SCALE)
        torch.testing.assert_close(causal_out, causal_expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(kv.key_SHD.nan_to_num(), before.nan_to_num())


def test_registry_names() -> None:
    assert isinstance(get_attention_backend("auto"), ReferenceAttention)
    assert isinstance(get_attention_backend("auto", device="cuda"), StaticAttention)
    assert isinstance(get_attention_backend("reference", device="cuda"), ReferenceAttention)
    assert isinstance(get_attention_backend("static"), StaticAttention)
    with pytest.raises(ConfigError, match=r"'flash'.*auto, reference, static"):
        get_attention_backend("flash")
