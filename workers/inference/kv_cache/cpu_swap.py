"""Swapping of preempted requests' full blocks to CPU memory, when that beats recomputing them.

Tracks slots in CPU memory and the copies of a step; `paged_cache` does the copying. Swap versus
recompute after PagedAttention (arXiv 2309.06180, section 4.5), decided by measured seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.request import Request

_NEWEST = 0.3  # weight of the newest measurement


@dataclass(slots=True)
class SwapCosts:
    """Measured seconds: a block to CPU memory and back, one prompt token computed; 0 is unknown."""

    block_s: float = 0.0
    token_s: float = 0.0

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of a step that was mostly prefill."""
        newest = seconds / max(1, tokens)
        self.token_s = (
            newest if not self.token_s else (1 - _NEWEST) * self.token_s + _NEWEST * newest
        )

    def prefers_swap(self, block_size: int) -> bool:
        """Whether swapping a block costs less than recomputing its tokens."""
        return 0 < self.block_s < self.token_s * block_size


class CpuBlocks:
    """Slots 0 to `blocks` - 1 in CPU memory, each with at most one full block, found by its hash.

    The least recently used block is overwritten, but none that the current step reads or writes
    (until `finish_step`).
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._empty = list(range(blocks))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # in LRU order
        self._pinned: set[bytes] = set()

    @property
    def used(self) -> int:
        """Slots that hold a block."""
        return len(self._slots)

    def put(self, key: bytes) -> int | None:
        """The slot to copy a block to; None if the block is there already or all are pinned."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        if not self._empty:
            oldest = next((stored for stored in self._slots if stored not in self._pinned), None)
            if oldest is None:
                return None
            self._empty.append(self._slots.pop(oldest))
        slot = self._slots[key] = self._empty.pop()
        self._pinned.add(key)
        return slot

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of the longest stored prefix of `keys`; `pin` those that are read."""
        slots: list[int] = []
        for key in keys:
            slot = self._slots.get(key)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep these blocks until the step that reads them is computed."""
        for key in keys:
            self._slots.move_to_end(key)
            self._pinned.add(key)

    def finish_step(self) -> None:
        """Unpin all blocks: the copies of the step are done."""
        self._pinned.clear()


class Swapper:
    """The swaps of a step: `swap_outs` (block, slot) and `swap_ins` (slot, block).

    Without `cpu_blocks` nothing is swapped, and preempted requests are recomputed.
    """

    def __init__(self, pool: BlockPool, cpu_blocks: CpuBlocks | None) -> None:
        self.pool, self.cpu_blocks = pool, cpu_blocks
        self.costs = SwapCosts()
        self.total = 0  # blocks that were swapped out
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []

    def begin_step(self) -> None:
        """Start planning a step."""
        self.swap_outs, self.swap_ins = [], []

    def finish_step(self) -> None:
        """Record that the step is computed."""
        if self.cpu_blocks is not None:
            self.cpu_blocks.finish_step()

    def swap_out(self, victim: Request) -> None:
        """Swap out its full blocks if that is cheaper; call it before they are released."""
        page = self.pool.block_size
        if self.cpu_blocks is None or not self.costs.prefers_swap(page):
            return
        full = victim.computed // page
        keys = victim.block_keys(full, page)
        slots = [
            (victim.blocks[place], self.cpu_blocks.put(keys[place]))
            for place in range(victim.freed_blocks, full)
        ]
        swap_outs = [(block, slot) for block, slot in slots if slot is not None]
        self.swap_outs += swap_outs
        self.total += len(swap_outs)

    def swap_in(self, request: Request, keys: list[bytes]) -> None:
        """Swap in the request's next blocks, `keys`, as far as they are stored."""
        if self.cpu_blocks is None:
            return
        slots = self.cpu_blocks.find(keys)
        for key, slot in zip(keys, slots, strict=False):
            block = self.pool.take()
            self.pool.seal(block, key)
            request.blocks.append(block)
            self.swap_ins.append((slot, block))
        self.cpu_blocks.pin(keys[: len(slots)])
        request.computed += len(slots) * self.pool.block_size
