"""Block tables of requests over one pool, with prefix reuse. Target KV and draft context share slots, so one table
serves both: what is matched, freed or evicted here is matched, freed or evicted for the two of them.

A block table is the request's own ``list[int]``: entry i holds the slots of positions i * kv_block_size and up. Only
the manager changes it. Blocks enter the prefix cache when all of their tokens are committed, never before, and only
slots behind the committed frontier are ever written, so a block that is shared is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.kv_cache.block_pool import BlockPool
from outrider.kv_cache.prefix_cache import PrefixCache


class KVCacheManager:
    """Counters: ``num_queried_tokens`` looked up, ``num_hit_tokens`` of them found (see ``acquire``)."""

    def __init__(self, *, num_blocks: int, kv_block_size: int, enable_prefix_caching: bool) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks} must be at least 1: the KV memory holds no block")
        if kv_block_size < 1:
            raise ConfigError(f"kv_block_size={kv_block_size} must be at least 1")
        self.kv_block_size = kv_block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(kv_block_size)

    @property
    def num_total(self) -> int:
        return self._pool.num_total

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones (which may be evicted) included."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, held or free."""
        return len(self._cache)

    def ref_count(self, block_id: int) -> int:
        return self._pool.ref_count(block_id)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover ``num_tokens`` slots."""
        return -(-num_tokens // self.kv_block_size)

    def match_prefix(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Blocks holding the longest known prefix, and its length in tokens. Changes nothing.

        Full blocks only, and never all of ``token_ids``: the last token is always left to be computed.
        """
        if not self.enable_prefix_caching:
            return [], 0
        found = self._cache.match(token_ids, (len(token_ids) - 1) // self.kv_block_size)
        # Of several blocks with the same contents one in use is best: taking it does not shrink the free queue.
        block_ids = [next((b for b in blocks if self._pool.ref_count(b)), next(iter(blocks))) for blocks in found]
        return block_ids, len(block_ids) * self.kv_block_size

    def acquire(
        self,
        block_ids: list[int],
        *,
        matched_block_ids: Sequence[int],
        num_tokens: int,
        num_spare_blocks: int,
    ) -> bool:
        """Fill an empty table with matched blocks (a fresh ``match_prefix``) and new ones, to cover ``num_tokens``.

        Changes nothing and returns False unless ``num_spare_blocks`` stay free afterwards.
        """
        assert not block_ids, "acquire needs an empty block table"
        num_new = self.num_blocks_for(num_tokens) - len(matched_block_ids)
        assert num_new >= 0, (num_tokens, len(matched_block_ids))
        num_revived = sum(self._pool.ref_count(block_id) == 0 for block_id in matched_block_ids)
        if num_new + num_revived + num_spare_blocks > self.num_free:
            return False
        for block_id in matched_block_ids:
            self._pool.share(block_id)
        block_ids.extend(matched_block_ids)
        grown = self.allocate(block_ids, num_tokens)
        assert grown
        return True

    def count_lookup(self, *, num_queried: int, num_hit: int) -> None:
        """Account one request's lookup. Apart from ``match_prefix``, which may be repeated while a request waits."""
        if self.enable_prefix_caching:
            self.num_queried_tokens += num_queried
            self.num_hit_tokens += num_hit

    def allocate(self, block_ids: list[int], num_tokens: int) -> bool:
        """Grow a table so that it covers ``num_tokens`` slots; changes nothing and returns False if memory is short."""
        num_new = self.num_blocks_for(num_tokens) - len(block_ids)
        if num_new > self.num_free:
            return False
        for _ in range(num_new):
            block_id = self._pool.allocate()
            self._cache.forget(block_id)
            block_ids.append(block_id)
        return True

    def cache_full_blocks(self, block_ids: Sequence[int], *, first_block: int, token_ids: Sequence[int]) -> None:
        """Register the blocks from ``first_block`` on, whose committed contents are ``token_ids`` (whole blocks).

        All blocks before ``first_block`` are registered already.
        """
        if not self.enable_prefix_caching:
            return
        size = self.kv_block_size
        assert len(token_ids) % size == 0, (len(token_ids), size)
        for i in range(len(token_ids) // size):
            index = first_block + i
            parent = block_ids[index - 1] if index else None
            self._cache.insert(block_ids[index], tuple(token_ids[i * size : (i + 1) * size]), parent_block_id=parent)

    def trim(self, block_ids: list[int], num_tokens: int) -> None:
        """Return the blocks at the table's end that are not needed to cover ``num_tokens`` slots."""
        num_kept = self.num_blocks_for(num_tokens)
        while len(block_ids) > num_kept:
            block_id = block_ids.pop()  # the end first: see the invariant of the prefix cache
            self._pool.release(block_id, keep_contents=block_id in self._cache)

    def free(self, block_ids: list[int]) -> None:
        """Return all of a table's blocks. Cached ones stay reusable until they are evicted."""
        self.trim(block_ids, 0)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents; refused (False) while any block is held."""
        if self.num_free != self.num_total:
            return False
        self._cache = PrefixCache(self.kv_block_size)
        return True
