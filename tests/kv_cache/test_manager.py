"""Block tables: growth, prefix reuse, eviction, return of memory."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.kv_cache.manager import KVCacheManager


def make_manager(*, num_blocks: int = 6, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, kv_block_size=4, enable_prefix_caching=enable_prefix_caching)


def computed_table(manager: KVCacheManager, num_tokens: int) -> list[int]:
    """A table with the tokens 0..num_tokens-1, committed."""
    table: list[int] = []
    assert manager.allocate(table, num_tokens)
    manager.cache_full_blocks(table, first_block=0, token_ids=range(num_tokens // 4 * 4))
    return table


def test_allocate_covers_the_slots_or_changes_nothing() -> None:
    manager = make_manager()
    table: list[int] = []
    assert manager.allocate(table, 9)
    assert len(table) == 3
    assert manager.allocate(table, 12)
    assert manager.allocate(table, 1)
    assert len(table) == 3
    other: list[int] = []
    assert not manager.allocate(other, 13)
    assert other == []
    assert manager.num_free == 3


def test_match_takes_full_blocks_and_never_the_whole() -> None:
    manager = make_manager()
    table = computed_table(manager, 11)
    assert manager.match_prefix(range(11)) == (table[:2], 8)
    assert manager.match_prefix(range(9)) == (table[:2], 8)
    assert manager.match_prefix(range(8)) == (table[:1], 4)
    assert manager.match_prefix(range(4)) == ([], 0)
    assert manager.match_prefix(()) == ([], 0)
    assert manager.match_prefix((0, 1, 2, 9, 4)) == ([], 0)


def test_freed_blocks_stay_known_until_they_are_evicted_longest_prefix_first() -> None:
    manager = make_manager()
    table = computed_table(manager, 10)
    first, second = table[:2]
    manager.free(table)
    assert table == []
    assert (manager.num_free, manager.num_cached) == (6, 2)
    assert manager.match_prefix(range(10)) == ([first, second], 8)
    assert manager.allocate(table, 16)  # the four blocks without contents
    assert manager.match_prefix(range(10)) == ([first, second], 8)
    assert manager.allocate(table, 20)
    assert manager.match_prefix(range(10)) == ([first], 4)
    assert manager.allocate(table, 24)
    assert manager.match_prefix(range(10)) == ([], 0)
    assert manager.num_cached == 0


def test_freed_blocks_without_contents_are_reused_before_cached_ones() -> None:
    manager = make_manager(num_blocks=2)
    table = computed_table(manager, 4)
    cached = list(table)
    assert manager.allocate(table, 8)
    (plain,) = table[1:]
    other: list[int] = []
    manager.free(table[:1])
    manager.free(table[1:])  # released last, reused first
    assert manager.allocate(other, 4)
    assert other == [plain]
    assert manager.match_prefix(range(5)) == (cached, 4)


def test_acquire_shares_what_matches() -> None:
    manager = make_manager()
    table = computed_table(manager, 10)
    matched, num_matched = manager.match_prefix(range(12))
    assert num_matched == 8
    other: list[int] = []
    assert manager.acquire(other, matched_block_ids=matched, num_tokens=12, num_spare_blocks=2)
    assert other[:2] == table[:2]
    assert other[2] != table[2]
    assert [manager.ref_count(block_id) for block_id in other] == [2, 2, 1]
    manager.free(table)
    assert [manager.ref_count(block_id) for block_id in other] == [1, 1, 1]
    manager.free(other)
    assert manager.num_free == 6


def test_acquire_counts_free_matched_blocks_and_spare_ones() -> None:
    manager = make_manager(num_blocks=4)
    manager.free(computed_table(manager, 8))
    matched, _ = manager.match_prefix(range(12))
    other: list[int] = []
    assert not manager.acquire(other, matched_block_ids=matched, num_tokens=12, num_spare_blocks=2)
    assert other == []
    assert manager.num_free == 4
    assert not manager.acquire(other, matched_block_ids=matched, num_tokens=20, num_spare_blocks=0)
    assert manager.acquire(other, matched_block_ids=matched, num_tokens=12, num_spare_blocks=1)
    assert manager.num_free == 1


def test_match_prefers_blocks_in_use() -> None:
    manager = make_manager()
    first, second = computed_table(manager, 4), computed_table(manager, 4)
    manager.free(first)
    assert manager.match_prefix(range(5)) == (second, 4)


def test_trim_returns_the_end_of_a_table() -> None:
    manager = make_manager()
    table = computed_table(manager, 20)
    kept = table[:3]
    manager.trim(table, 9)
    assert table == kept
    manager.trim(table, 12)
    assert table == kept
    assert manager.num_free == 3


def test_without_prefix_caching_nothing_is_known_or_counted() -> None:
    manager = make_manager(enable_prefix_caching=False)
    manager.free(computed_table(manager, 12))
    assert manager.match_prefix(range(12)) == ([], 0)
    manager.count_lookup(num_queried=12, num_hit=0)
    assert (manager.num_cached, manager.num_queried_tokens) == (0, 0)


def test_reset_is_refused_while_a_block_is_held() -> None:
    manager = make_manager()
    table = computed_table(manager, 8)
    assert not manager.reset_prefix_cache()
    assert manager.num_cached == 2
    manager.free(table)
    assert manager.reset_prefix_cache()
    assert manager.match_prefix(range(8)) == ([], 0)


def test_memory_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks=0"):
        make_manager(num_blocks=0)
    with pytest.raises(ConfigError, match="kv_block_size=0"):
        KVCacheManager(num_blocks=1, kv_block_size=0, enable_prefix_caching=True)
