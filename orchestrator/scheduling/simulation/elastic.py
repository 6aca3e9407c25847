"""Simulation of elastic runs: they start small, shrink for waiting runs and grow on free devices.

The choice of runs that shrink, the placement at another size and the rule when growth is worth a
restart are the scheduler's own code. Does not depend on Django.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.scheduling.ordering.orders import Order
from orchestrator.scheduling.placement.requests import QueuedRun, Size
from orchestrator.scheduling.preemption.resizing import RESTART_S, YOUNG_S, saves_time
from orchestrator.scheduling.preemption.victims import Holder, choose
from orchestrator.scheduling.simulation.simulate import POOL, Outcome, Simulation
from orchestrator.scheduling.simulation.traces import Trace

SMALLEST: Final = 4  # an elastic run may shrink to this part of its devices
# the scheduler's defaults of ORRERY_GROW_AFTER_S and ORRERY_GROW_EVERY_S
GROW_AFTER_S: Final = 120.0
GROW_EVERY_S: Final = 600.0
_MOST_SHRINKS: Final = 4  # waiting runs per event for which others shrink
_WAKE: Final = -1  # an event that only looks at sizes again


def simulate_elastic(
    trace: Trace,
    order: Order,
    *,
    nodes: int,
    devices_per_node: int,
    renew: Callable[[], None] | None = None,
) -> Outcome:
    """`simulate` with elastic runs, for an order with `elastic`."""
    return ElasticSimulation(trace, order, nodes, devices_per_node).run(renew)


@dataclass
class _Progress:
    """A running run: its size, and the part of its work that was left at `since`."""

    devices: int
    since: float
    left: float  # 1 at its start
    begins: float  # of work: a restart comes before
    changed: float


class ElasticSimulation(Simulation):
    """Every run of 2 and more devices is elastic; fewer devices take proportionally longer."""

    def __init__(self, trace: Trace, order: Order, nodes: int, devices_per_node: int) -> None:
        super().__init__(trace, order, nodes, devices_per_node)
        self._queued = [replace(run, smaller=smaller_sizes(run.devices)) for run in self._queued]
        self._progress: dict[int, _Progress] = {}
        self._could_grow: dict[int, float] = {}  # run → when it may
        self._stuck: set[int] = set()  # fit nowhere at a larger size until other devices are free
        self._placed: list[QueuedRun] = []  # at their smallest size, at this time
        self._outcome.changes = []

    def _pass(self, now: float) -> None:
        gangs, waiting, reserves = self._gangs, self._waiting, self._order.reserves
        gangs.next_pass(now)
        groups = gangs.groups[POOL]
        for run in waiting.in_order(now, self._free):
            least = self._at(run, run.least, 1.0)
            backfill = gangs.may_backfill(least)
            if not backfill and waiting.hopeless(run):
                continue
            if least.devices <= self._free and gangs.start(least, groups, backfill=backfill):
                self._started(run, now)
                if not self._free:
                    break
                continue
            waiting.failed(run, backfill=backfill or not reserves)
            if reserves and POOL not in gangs.reservations:
                gangs.reserve(least, groups)
        self._enlarge_placed(now)

    def _started(self, run: QueuedRun, now: float) -> None:
        self._waiting.remove(run)
        self._running[run.run] = run
        self._starts[run.run] = now
        self._progress[run.run] = _Progress(run.least, now, 1.0, now, now)
        self._take(run, run.least, now)
        self._schedule(run, now)
        if run.smaller:
            self._placed.append(run)

    def _end(self, number: int, now: float) -> None:
        if number not in self._running or self._stops[number] > now:
            return  # a wake-up, or the end at an earlier size
        run = self._running.pop(number)
        self._gangs.release(run)
        self._take(run, -self._progress.pop(number).devices, now)
        self._could_grow.pop(number, None)
        self._stuck.clear()

    def _enlarge_placed(self, now: float) -> None:
        """Divide what is free after all runs have been tried."""
        for run in self._placed:
            self._enlarge(run, now)
        self._placed.clear()

    def _enlarge(self, run: QueuedRun, now: float) -> None:
        """Give a run that has just been placed the largest size for which devices are free."""
        progress = self._progress[run.run]
        for devices in run.sizes[:-1]:
            if devices - progress.devices > self._free:
                continue
            if self._gangs.enlarge(self._at(run, devices, progress.left)):
                if progress.begins > now:
                    self._outcome.lost_device_s += RESTART_S * (devices - progress.devices)
                self._take(run, devices - progress.devices, now)
                progress.devices = devices
                self._schedule(run, now)
                return

    def _resize(self, now: float) -> None:
        if self._waiting:
            self._could_grow.clear()
            self._shrink(now)
            if not (self._waiting and self._free):
                self._enlarge_placed(now)  # else after the pass
        elif self._free:
            self._grow(now)
        else:
            self._could_grow.clear()

    def _shrink(self, now: float) -> None:
        """Shrink runs for those that wait first, as the scheduler chooses them."""
        for _ in range(_MOST_SHRINKS):
            run = self._waiting.first(now)
            if run is None or self._free + self._spare(now) < run.least:
                return
            least = self._at(run, run.least, 1.0)
            if self._gangs.fits(least, self._gangs.groups[POOL], backfill=True):
                return  # the pass starts it
            victims = choose(least, self._views(), self._holders(now), now)
            if victims.stopped or not victims.shrunk:
                return  # a simulated run does not stop before its end
            shrunk = [self._running[number] for number in victims.shrunk]
            for each in shrunk:
                self._gangs.release(each)
            self._gangs.next_pass(now)
            for each in shrunk:
                self._restart(each, each.least, now)
            self._placed += shrunk
            groups = self._gangs.groups[POOL]
            if self._gangs.start(least, groups, backfill=True) is None:
                return
            self._started(run, now)

    def _grow(self, now: float) -> None:
        """Grow the run that lacks most of its size, if it could for long enough."""
        able = {}
        for number, progress in self._progress.items():
            run = self._running[number]
            if progress.devices == run.devices or number in self._stuck:
                continue
            sizes = [size for size in run.sizes if size > progress.devices]
            free = [size for size in sizes if size - progress.devices <= self._free]
            if free and self._is_worth(run, free[0], now):
                able[number] = free[0]
        for number in able.keys() - self._could_grow.keys():
            may = max(now + GROW_AFTER_S, self._progress[number].changed + GROW_EVERY_S)
            self._could_grow[number] = may
            heapq.heappush(self._ends, (may, _WAKE))
        self._could_grow = {number: self._could_grow[number] for number in able}
        due = [number for number, may in self._could_grow.items() if now >= may]
        if not due:
            return
        if len(due) > 1:
            heapq.heappush(self._ends, (now, _WAKE))
        part = {run: self._progress[run].devices / self._running[run].devices for run in due}
        run = self._running[min(due, key=lambda number: (part[number], number))]
        progress = self._progress[run.run]
        self._advance(run, now)
        if self._gangs.enlarge(self._at(run, able[run.run], progress.left)):
            self._take(run, able[run.run] - progress.devices, now)
            self._changed(run, able[run.run], now)
        else:
            self._stuck.add(run.run)
        del self._could_grow[run.run]

    def _restart(self, run: QueuedRun, devices: int, now: float) -> None:
        """Continue a run that holds nothing at this size."""
        progress = self._progress[run.run]
        self._advance(run, now)
        self._take(run, -progress.devices, now)
        variant = self._at(run, devices, progress.left)
        if self._gangs.start(variant, self._gangs.groups[POOL], backfill=True) is None:
            raise RuntimeError(f"run {run.run} does not fit after it shrank")  # `choose` tried it
        self._take(run, devices, now)
        self._changed(run, devices, now)

    def _changed(self, run: QueuedRun, devices: int, now: float) -> None:
        progress = self._progress[run.run]
        progress.devices, progress.changed, progress.begins = devices, now, now + RESTART_S
        self._outcome.lost_device_s += RESTART_S * devices
        self._outcome.resizes += 1
        self._stuck.clear()
        self._schedule(run, now)

    def _advance(self, run: QueuedRun, now: float) -> None:
        """Count the work that is done so far."""
        progress = self._progress[run.run]
        progress.left, progress.since = self._left(run, now), now

    def _left(self, run: QueuedRun, now: float) -> float:
        """The part of the run's work that is left now."""
        progress = self._progress[run.run]
        worked = max(0.0, now - max(progress.since, progress.begins))
        slowdown = run.devices / progress.devices
        return progress.left - worked / (self._durations[run.run] * slowdown)

    def _schedule(self, run: QueuedRun, now: float) -> None:
        """Set the time at which the run ends at its size."""
        progress = self._progress[run.run]
        lasts = max(0.0, progress.left) * self._durations[run.run] * run.devices / progress.devices
        end = self._stops[run.run] = max(now, progress.begins) + lasts
        heapq.heappush(self._ends, (end, run.run))

    def _take(self, run: QueuedRun, devices: int, now: float) -> None:
        self._free -= devices
        assert self._outcome.changes is not None
        self._outcome.changes.append((now, run.run, devices))
        if self._order.by_owner:
            self._usage.change(run.team, run.owner, devices, now)

    def _holders(self, now: float) -> dict[int, Holder]:
        """The elastic runs above their smallest size; their checkpoint is of their last step."""
        return {
            number: Holder(
                number,
                self._running[number].priority,
                progress.devices,
                0.0,
                fixed=now - progress.changed < YOUNG_S,
                shrunk=self._running[number],
            )
            for number, progress in self._progress.items()
            if progress.devices > self._running[number].least
        }

    def _spare(self, now: float) -> int:
        """Devices that runs above their smallest size can give."""
        return sum(
            progress.devices - self._running[number].least
            for number, progress in self._progress.items()
            if now - progress.changed >= YOUNG_S
        )

    def _is_worth(self, run: QueuedRun, size: int, now: float) -> bool:
        """By the predicted time that is left, as the scheduler measures it from progress."""
        progress = self._progress[run.run]
        slowdown, larger = run.devices / progress.devices, run.devices / size
        left = (run.expected_s or 0.0) * self._left(run, now) * slowdown
        return saves_time(left, slowdown=slowdown, larger=larger)

    def _at(self, run: QueuedRun, devices: int, left: float) -> QueuedRun:
        """The run at a size with limits that hold for the work that is left."""
        factor = left * run.devices / devices
        extra = 0.0 if left == 1.0 else RESTART_S
        return replace(
            run,
            devices=devices,
            smaller=(),
            max_seconds=None
            if run.max_seconds is None
            else max(1.0, factor * run.max_seconds) + extra,
            min_seconds=max(0.0, factor * run.min_seconds),
        )


def smaller_sizes(devices: int) -> tuple[Size, ...]:
    """The smaller sizes of a run, largest first; a step takes the same device time on each."""
    sizes = []
    size = devices
    while size % 2 == 0 and size // 2 * SMALLEST >= devices:
        size //= 2
        sizes.append(Size(size, devices / size))
    return tuple(sizes)
