"""Which full blocks hold which token prefix: a trie with one block's tokens on each edge.

Lookups compare the tokens themselves (an edge is a dict key), so equal hashes of different prefixes cannot be mixed
up. One prefix may be held by several blocks, when requests computed it at the same time; it is known as long as one
of them is. Only committed tokens enter; a block that is handed out for other contents must be forgotten first.

Invariant: whoever holds a block holds a block of each shorter prefix as well and releases the longer ones first, and
blocks are reused in the order of their release; so a prefix is never forgotten before its continuations are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None  # None: the root, the empty prefix
    tokens: tuple[int, ...]  # of the last block of this prefix
    block_ids: dict[int, None] = field(default_factory=dict)  # blocks that hold it, an ordered set
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixCache:
    def __init__(self, kv_block_size: int) -> None:
        self._kv_block_size = kv_block_size
        self._root = _Node(None, ())
        self._node_of_block: dict[int, _Node] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._node_of_block

    def __len__(self) -> int:
        """Number of blocks whose contents are known."""
        return len(self._node_of_block)

    def match(self, token_ids: Sequence[int], max_blocks: int) -> list[Collection[int]]:
        """For each leading full block of ``token_ids`` that is known, at most ``max_blocks``: the blocks holding it."""
        size = self._kv_block_size
        node = self._root
        found: list[Collection[int]] = []
        for start in range(0, max_blocks * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            found.append(child.block_ids.keys())
            node = child
        return found

    def insert(self, block_id: int, tokens: tuple[int, ...], *, parent_block_id: int | None) -> None:
        """Register a full block that follows the registered ``parent_block_id``, or begins the text where None."""
        assert len(tokens) == self._kv_block_size, (len(tokens), self._kv_block_size)
        assert block_id not in self._node_of_block, f"block {block_id} is registered already"
        parent = self._root if parent_block_id is None else self._node_of_block[parent_block_id]
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = _Node(parent, tokens)
        node.block_ids[block_id] = None
        self._node_of_block[block_id] = node

    def forget(self, block_id: int) -> None:
        """The block is about to be overwritten; no effect on a block that is not registered."""
        node = self._node_of_block.pop(block_id, None)
        if node is None:
            return
        del node.block_ids[block_id]
        if not node.block_ids:
            assert not node.children, f"block {block_id} is forgotten before the blocks that continue it"
            assert node.parent is not None
            del node.parent.children[node.tokens]
