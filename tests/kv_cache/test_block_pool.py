"""Block pool: counts, order of reuse, misuse."""

from __future__ import annotations

import pytest

from outrider.kv_cache.block_pool import BlockPool


def test_a_block_is_free_exactly_when_nobody_holds_it() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    assert (pool.num_total, pool.num_free, pool.ref_count(block)) == (3, 2, 1)
    pool.share(block)
    pool.release(block, keep_contents=True)
    assert (pool.num_free, pool.ref_count(block)) == (2, 1)
    pool.release(block, keep_contents=True)
    assert (pool.num_free, pool.ref_count(block)) == (3, 0)


def test_blocks_with_contents_are_reused_last_and_in_order_of_release() -> None:
    pool = BlockPool(5)
    kept_first, kept_second, plain = (pool.allocate() for _ in range(3))
    pool.release(kept_first, keep_contents=True)
    pool.release(plain, keep_contents=False)
    pool.release(kept_second, keep_contents=True)
    assert [pool.allocate() for _ in range(5)] == [plain, 3, 4, kept_first, kept_second]


def test_sharing_a_free_block_brings_it_back() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block, keep_contents=True)
    pool.share(block)
    assert (pool.num_free, pool.ref_count(block)) == (1, 1)
    assert pool.allocate() != block


def test_misuse_is_an_error() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="empty pool"):
        pool.allocate()
    pool.release(block, keep_contents=False)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.release(block, keep_contents=False)
