"""Reference-counted blocks of the paged pool; allocate, share and release are O(1).

Invariant: a block is in the free queue exactly when its reference count is 0. The queue is taken from the front.
Released blocks whose contents are worth keeping go to its back, so they stay intact the longest and are reused in the
order of their release; blocks without such contents go to its front and are reused first. The pool knows nothing of
tokens; who keeps contents (the prefix cache) must forget a block when ``allocate`` hands it out.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_total(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self) -> int:
        """Take the block whose contents are worth least; its reference count becomes 1."""
        assert self._free, "allocate from an empty pool"
        block_id, _ = self._free.popitem(last=False)
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a block in use, or bring a free one back with its contents."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep_contents: bool) -> None:
        """Drop one reference; the last one returns the block to the free queue (see the module's docstring)."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} released more often than it was taken"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._free[block_id] = None
            if not keep_contents:
                self._free.move_to_end(block_id, last=False)
