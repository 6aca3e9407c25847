"""Full blocks of preempted requests in CPU memory, found by what they hold, and when they are worth
keeping there.

Pure bookkeeping of places and of the copies that a step makes; the copying is the cache's. Swapping
against recomputing
after PagedAttention (arXiv 2309.06180, section 4.5), decided by measured seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.inference.blocks import BlockPool
from workers.inference.request import Request

_NEWEST = 0.3  # weight of the newest measurement


@dataclass(slots=True)
class Costs:
    """Seconds, measured: of a block to CPU memory and back, and of a prompt's token computed; 0 is
    not known yet.
    """

    block_s: float = 0.0
    token_s: float = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that was mostly prompt took so long."""
        each = seconds / max(1, tokens)
        self.token_s = each if not self.token_s else (1 - _NEWEST) * self.token_s + _NEWEST * each

    def prefers_swap(self, block_size: int) -> bool:
        """Whether a block that comes back costs less than its tokens computed again."""
        return 0 < self.block_s < self.token_s * block_size


class HostBlocks:
    """Places 0 to `blocks` - 1, each with at most one full block, under the key that stands for all
    tokens up to its
    end. The longest unused is overwritten; none that is read or written in the present step, until
    `stepped`.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._empty = list(range(blocks))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._busy: set[bytes] = set()

    @property
    def used(self) -> int:
        return len(self._place_of)

    def put(self, key: bytes) -> int | None:
        """The place to copy a block to; None where it is there already or every place is busy."""
        if key in self._place_of:
            self._place_of.move_to_end(key)
            return None
        if not self._empty:
            oldest = next((each for each in self._place_of if each not in self._busy), None)
            if oldest is None:
                return None
            self._empty.append(self._place_of.pop(oldest))
        place = self._place_of[key] = self._empty.pop()
        self._busy.add(key)
        return place

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The places of the longest known beginning of `keys`; `hold` those that are read."""
        found: list[int] = []
        for key in keys:
            place = self._place_of.get(key)
            if place is None:
                break
            found.append(place)
        return found

    def hold(self, keys: Sequence[bytes]) -> None:
        """Keep these until the step that reads them is computed."""
        for key in keys:
            self._place_of.move_to_end(key)
            self._busy.add(key)

    def stepped(self) -> None:
        """All copies of the step are done."""
        self._busy.clear()


class Swaps:
    """The copies of a step: `outs` (block, place) of those that are preempted in it, `ins` (place,
    block) of those that
    come back. Without `host` there are none, and everything is computed again."""

    def __init__(self, pool: BlockPool, host: HostBlocks | None) -> None:
        self.pool, self.host = pool, host
        self.costs = Costs()
        self.total = 0  # blocks that went to CPU memory
        self.outs: list[tuple[int, int]] = []
        self.ins: list[tuple[int, int]] = []

    def begin(self) -> None:
        """A step is planned."""
        self.outs, self.ins = [], []

    def stepped(self) -> None:
        """It is computed."""
        if self.host is not None:
            self.host.stepped()

    def put_out(self, victim: Request) -> None:
        """Its full blocks, where that costs less than computing them again; before they are
        released.
        """
        page = self.pool.block_size
        if self.host is None or not self.costs.prefers_swap(page):
            return
        full = victim.computed // page
        keys = victim.keys(full, page)
        places = [
            (victim.blocks[each], self.host.put(keys[each])) for each in range(victim.gone, full)
        ]
        outs = [(block, place) for block, place in places if place is not None]
        self.outs += outs
        self.total += len(outs)

    def bring_in(self, request: Request, keys: list[bytes]) -> None:
        """The next blocks of the request, `keys`, as far as they are here; they hold before the
        step reads them.
        """
        if self.host is None:
            return
        places = self.host.find(keys)
        for key, place in zip(keys, places, strict=False):
            block = self.pool.take()
            self.pool.seal(block, key)
            request.blocks.append(block)
            self.ins.append((place, block))
        self.host.hold(keys[: len(places)])
        request.computed += len(places) * self.pool.block_size
