"""The waiting runs of a simulation, grouped so that a pass tries few of them.

Runs of the same size and priority, and the same owner where the policy compares owners, need the
same devices: if one fits nowhere, neither does another. Does not decide which run starts.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.ordering.orders import Order, effective_priority
from orchestrator.scheduling.placement.requests import QueuedRun

# of one group, this many runs may be tried for reserved devices in a pass
BACKFILL_TRIES = 64

Shape = tuple[int, int]  # devices, together
_Group = tuple[int, str, str, Shape]  # priority, team, person, shape


class WaitingRuns:
    """Sorted groups of waiting runs of one pool."""

    def __init__(self, order: Order, usage: DecayedUsage) -> None:
        self._order, self._usage = order, usage
        self._groups: dict[_Group, list[tuple[float, int, QueuedRun]]] = {}
        self._count = 0
        self._unfit: set[Shape] = set()  # of this pass: no free devices
        self._unfit_reserved: set[Shape] = set()  # of this pass: not even the reserved ones

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedRun]:
        return (entry[2] for group in self._groups.values() for entry in group)

    def add(self, run: QueuedRun) -> None:
        """Add a run."""
        group = self._groups.setdefault(self._group(run), [])
        insort(group, (self._order.base(run), run.run, run))
        self._count += 1

    def remove(self, run: QueuedRun) -> None:
        """Remove a run that has started."""
        key = self._group(run)
        group = self._groups[key]
        del group[bisect_left(group, (self._order.base(run), run.run))]
        if not group:
            del self._groups[key]
        self._count -= 1

    def first(self, now: float) -> QueuedRun | None:
        """The run that is first in the policy's order."""
        return min(
            (self._entry(key, group, 0, now) for key, group in self._groups.items()),
            default=(None,) * 6,
        )[5]

    def in_order(self, now: float, free: int) -> Iterator[QueuedRun]:
        """Runs to try, in the policy's order; skips those that cannot fit by `failed`."""
        self._unfit.clear()
        self._unfit_reserved.clear()
        order = self._order
        all_sizes = order.head_blocks or order.reserves  # a run above `free` holds others back
        heap = [
            (self._entry(key, group, 0, now), key, 0)
            for key, group in self._groups.items()
            if all_sizes or key[3][0] <= free
        ]
        heapq.heapify(heap)
        while heap:
            entry, key, tried = heapq.heappop(heap)
            run = entry[5]
            assert run is not None
            shape = key[3]
            if shape in self._unfit_reserved:
                continue
            before = self._count
            yield run
            if order.head_blocks and self._count == before:
                return
            group = self._groups.get(key)
            if group is None or shape in self._unfit_reserved:
                continue
            if self._count < before:  # it started: the next one takes its place
                heapq.heappush(heap, (self._entry(key, group, tried, now), key, tried))
            elif tried + 1 < min(len(group), BACKFILL_TRIES):
                following = self._entry(key, group, tried + 1, now)
                heapq.heappush(heap, (following, key, tried + 1))

    def failed(self, run: QueuedRun, *, backfill: bool) -> None:
        """The run fits nowhere in this pass, even on reserved devices with `backfill`."""
        shape = run.least, run.together
        (self._unfit_reserved if backfill else self._unfit).add(shape)

    def hopeless(self, run: QueuedRun) -> bool:
        """Whether a run of its size has already failed on unreserved devices."""
        return (run.least, run.together) in self._unfit

    def _group(self, run: QueuedRun) -> _Group:
        team, person = (run.team, run.owner) if self._order.by_owner else ("", "")
        priority = run.priority if self._order.by_priority else 0
        return priority, team, person, (run.least, run.together)

    def _entry(
        self, key: _Group, group: list[tuple[float, int, QueuedRun]], place: int, now: float
    ) -> tuple[float, float, float, float, int, QueuedRun | None]:
        if place >= len(group):
            place = len(group) - 1
        base, number, run = group[place]
        first, second, later = self._order.rank(self._usage, key[1], key[2], now)
        priority = key[0]
        if self._order.by_priority:
            priority = effective_priority(priority, run.queued_at, now)
        return (-priority, first, second, base + later, number, run)
