"""The pool of KV cache blocks: reference counts, the free list, and lookup of full blocks by hash.

Tracks block numbers only; does not depend on tensors or requests. After PagedAttention
(arXiv 2309.06180).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class NoFreeBlock(RuntimeError):
    """Every block is in use; the caller has to wait or to preempt."""


class BlockPool:
    """Blocks 0 to `blocks` - 1 of `block_size` tokens; every call is O(1) per block.

    Blocks are reference-counted; only a sole holder may write to a block. A full block can be
    sealed under the hash of all tokens up to its end. When its last holder releases it, it stays
    cached and can be found by that hash, until it is evicted (least recently used first, after all
    empty blocks).
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool of {blocks} blocks of {block_size} tokens is empty; use at least 1 of each"
            )
        self.blocks, self.block_size = blocks, block_size
        self._references = [0] * blocks
        self._uses = [0] * blocks
        self._empty = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and sealed, in LRU order
        self._by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks without a holder, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with a holder."""
        return self.blocks - self.free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that this many tokens fill."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """How many hold the block."""
        return self._references[block]

    def uses(self, block: int) -> int:
        """How often the block was taken; its contents are the same while this does not change."""
        return self._uses[block]

    def is_sealed(self, block: int) -> bool:
        """Whether the block can be found by its hash."""
        return block in self._key_by_block

    def take(self) -> int:
        """A free block, with one reference. Raises NoFreeBlock."""
        if self._empty:
            block = self._empty.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._by_key[self._key_by_block.pop(block)]
        else:
            raise NoFreeBlock(f"all {self.blocks} blocks are in use")
        self._references[block] = 1
        self._uses[block] += 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; cached blocks are in use again."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]  # a KeyError here means that its contents were lost
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block.

        Pass a sequence's blocks in order: its last blocks are then evicted first. Raises
        ValueError for a block that is not in use.
        """
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but not in use")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_by_block:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def own(self, block: int) -> int:
        """This block if the caller is its sole holder, else a new block in its place.

        The caller has to copy the contents to a new block (copy on write). Raises NoFreeBlock.
        """
        if self._references[block] == 1:
            return block
        copy = self.take()
        self._references[block] -= 1
        return copy

    def seal(self, block: int, key: bytes) -> None:
        """Make a full block findable by `key`; a block that is already under that key stays."""
        if key not in self._by_key and block not in self._key_by_block:
            self._by_key[key] = block
            self._key_by_block[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`; `share` them before any `take`."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self) -> None:
        """Make no block findable any more, such as after a change of the weights."""
        self._empty += reversed(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._key_by_block.clear()

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free now, and would not be after `share`."""
        return sum(self._references[block] == 0 for block in blocks)


def hash_block(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block, from the key of the block before it (empty for the first).

    A cryptographic hash: a collision would give one request the keys and values of another.
    """
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()
