"""Prefix trie: what matches, duplicates, forgetting."""

from __future__ import annotations

import pytest

from outrider.kv_cache.prefix_cache import PrefixCache


def found(cache: PrefixCache, *token_ids: int) -> list[list[int]]:
    return [list(blocks) for blocks in cache.match(token_ids, len(token_ids) // 2)]


def make_cache() -> PrefixCache:
    """Block 0 holds (1, 2); blocks 1 and 2 continue it with (3, 4) and (5, 6)."""
    cache = PrefixCache(2)
    cache.insert(0, (1, 2), parent_block_id=None)
    cache.insert(1, (3, 4), parent_block_id=0)
    cache.insert(2, (5, 6), parent_block_id=0)
    return cache


def test_the_whole_prefix_decides() -> None:
    cache = make_cache()
    assert found(cache, 1, 2, 5, 6, 3, 4) == [[0], [2]]
    assert found(cache, 3, 4) == []
    assert found(cache, 1, 2, 3, 5) == [[0]]
    assert list(map(list, cache.match((1, 2, 3, 4), 1))) == [[0]]


def test_tokens_whose_hashes_collide_are_told_apart() -> None:
    assert hash(-1) == hash(-2)  # so these tuples collide in every dict
    cache = PrefixCache(1)
    cache.insert(0, (-1,), parent_block_id=None)
    assert cache.match((-2,), 1) == []


def test_a_prefix_is_known_as_long_as_one_block_holds_it() -> None:
    cache = make_cache()
    cache.insert(7, (1, 2), parent_block_id=None)
    cache.insert(8, (9, 9), parent_block_id=7)
    assert found(cache, 1, 2, 9, 9) == [[0, 7], [8]]
    cache.forget(0)
    assert found(cache, 1, 2, 3, 4) == [[7], [1]]
    assert len(cache) == 4
    for block_id in (8, 2, 1, 7):
        cache.forget(block_id)
    assert found(cache, 1, 2) == []
    assert len(cache) == 0


def test_forgetting_an_unknown_block_does_nothing() -> None:
    cache = make_cache()
    cache.forget(40)
    assert 40 not in cache
    assert len(cache) == 3


def test_misuse_is_an_error() -> None:
    cache = make_cache()
    with pytest.raises(AssertionError, match="registered already"):
        cache.insert(0, (7, 7), parent_block_id=None)
    with pytest.raises(AssertionError, match="before the blocks that continue it"):
        cache.forget(0)
