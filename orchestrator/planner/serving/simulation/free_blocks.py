"""Free cache blocks of a simulated engine, and what the full ones still hold."""

from __future__ import annotations

from collections import OrderedDict


class FreeBlocks:
    """Free blocks: empty ones, and full ones that still hold tokens of a request.

    Empty blocks are taken first, then the last blocks of the request that was released first.
    """

    def __init__(self, blocks: int) -> None:
        self.empty = blocks
        self.full: OrderedDict[int, int] = OrderedDict()  # blocks by request, the oldest first

    def take(self, count: int) -> None:
        """Take `count` of the free blocks."""
        empty = min(count, self.empty)
        self.empty -= empty
        count -= empty
        while count:
            number, blocks = next(iter(self.full.items()))
            if blocks > count:
                self.full[number] = blocks - count
                return
            del self.full[number]
            count -= blocks

    def release(self, number: int, full: int, blocks: int) -> None:
        """Free the blocks of a request, of which the first `full` are full."""
        self.empty += blocks - full
        if full:
            self.full[number] = full

    def reuse(self, number: int, most: int) -> int:
        """Take back what is left of a request's full blocks, at most `most`; how many."""
        full = self.full.pop(number, 0)
        self.empty += max(0, full - most)
        return min(full, most)
