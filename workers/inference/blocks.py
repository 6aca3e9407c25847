"""The pool of cache blocks: who holds which, which are free, and which full ones are known by what
they hold.

Pure bookkeeping of block numbers; knows no tensors and no requests. After PagedAttention (arXiv
2309.06180).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class NoFreeBlock(RuntimeError):
    """Every block of the pool is held; the caller has to wait or to preempt."""


class BlockPool:
    """Blocks 0 to `blocks` - 1 of `block_size` tokens; every call is O(1) for each block that it
    names.

    A block is held by as many as its references say; only a sole holder may write to it. A full
    block can be sealed
    under a key that stands for all tokens up to its end; when its last holder lets go, it keeps its
    contents, may be
    found again by that key, and is overwritten only after the free blocks that hold nothing,
    longest unused first.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool of {blocks} blocks of {block_size} tokens holds nothing; both want at "
                "least 1"
            )
        self.blocks, self.block_size = blocks, block_size
        self._references = [0] * blocks
        self._uses = [0] * blocks
        self._empty = list(range(blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, sealed; the longest unused first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def used(self) -> int:
        return self.blocks - self.free

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def uses(self, block: int) -> int:
        """How often it was taken: what is known of its contents holds as long as this stays."""
        return self._uses[block]

    def is_sealed(self, block: int) -> bool:
        return block in self._key_of

    def take(self) -> int:
        """A free block, with one reference. Raises NoFreeBlock."""
        if self._empty:
            block = self._empty.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            del self._by_key[self._key_of.pop(block)]
        else:
            raise NoFreeBlock(f"all {self.blocks} blocks are held")
        self._references[block] = 1
        self._uses[block] += 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each; free blocks that still hold their contents come back so."""
        for block in blocks:
            if self._references[block] == 0:
                del self._kept[block]  # a KeyError here would mean that contents were lost
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less.

        Give a sequence's blocks in order: its later ones are then overwritten first.
        """
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released and nobody holds it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def own(self, block: int) -> int:
        """A block with one holder that the caller may write to: this one, or a new one that takes
        its place.

        The contents of a new one have to be copied (copy on write). Raises NoFreeBlock.
        """
        if self._references[block] == 1:
            return block
        fresh = self.take()
        self._references[block] -= 1
        return fresh

    def seal(self, block: int, key: bytes) -> None:
        """Let a full block be found by `key`; where another block is, that one stays the one that
        is found.
        """
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of `keys`; `share` them before anything else is
        taken.
        """
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def would_take(self, found: Sequence[int]) -> int:
        """How many of these blocks are free now and would no longer be, if they were shared."""
        return sum(self._references[block] == 0 for block in found)


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block whose tokens follow those of the block with the key `before` (empty
    for the first).

    A cryptographic hash: a collision would give one request another's keys and values.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
