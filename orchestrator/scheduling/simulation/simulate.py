"""Event-driven simulation of one policy on a trace, with the scheduler's own placement code.

Each event is a submission or an end; after the events of one time the policy starts what fits. Ends
are exact, the policy sees predicted durations. Does not depend on Django.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.ordering.orders import Order
from orchestrator.scheduling.placement.capacity import NodeView, Slot
from orchestrator.scheduling.placement.gangs import Gangs
from orchestrator.scheduling.placement.requests import QueuedRun
from orchestrator.scheduling.simulation.traces import PREDICTION_ERROR, Trace
from orchestrator.scheduling.simulation.waiting_runs import WaitingRuns

POOL = "simulated"
RECENT_RUNS = 1000  # that an observer sees
_KIND = "device"


@dataclass
class Outcome:
    """When each run started and ended, in seconds; `blocked` counts idle device-seconds.

    `blocked_idle_s` is the device time idle while the first waiting run fits the total of free
    devices but no placement, until the last submission.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    blocked_idle_s: float = 0.0
    passes: int = field(default=0)
    lost_device_s: float = 0.0  # of restarts for another size
    resizes: int = 0
    # of elastic runs: time, run and devices that it gets or gives back
    changes: list[tuple[float, int, int]] | None = None


def simulate(
    trace: Trace,
    order: Order,
    *,
    nodes: int,
    devices_per_node: int,
    renew: Callable[[], None] | None = None,
    observe: Callable[[State], None] | None = None,
) -> Outcome:
    """Run the policy until the last run has ended.

    `renew` is called at every event, `observe` after each pass that leaves runs waiting.
    """
    return Simulation(trace, order, nodes, devices_per_node).run(renew, observe)


@dataclass(frozen=True)
class State:
    """A simulation after a pass: who waits, who holds what, and between when holders end."""

    now: float
    waiting: list[QueuedRun]
    nodes: list[NodeView]
    ends: dict[int, tuple[float, float]]
    usage: DecayedUsage
    recent: list[QueuedRun]  # submitted last
    starts: dict[int, float]  # of the holders


def together_for(devices: int, devices_per_node: int) -> int:
    """Devices of one node for a run without a plan: the largest number that divides evenly."""
    most = min(devices, devices_per_node)
    return next(count for count in range(most, 0, -1) if devices % count == 0)


class Simulation:
    """One policy on a trace; `run` once."""

    def __init__(self, trace: Trace, order: Order, nodes: int, devices_per_node: int) -> None:
        slots = tuple(Slot(index, _KIND, gpu=True) for index in range(devices_per_node))
        digits = len(str(nodes))
        views = [NodeView(f"n{number:0{digits}}", POOL, slots) for number in range(nodes)]
        self._trace, self._order = trace, order
        self._total = self._free = nodes * devices_per_node
        self._gangs = Gangs(views, 0.0)
        self._usage = DecayedUsage()
        self._waiting = WaitingRuns(order, self._usage)
        self._ends: list[tuple[float, int]] = []
        self._running: dict[int, QueuedRun] = {}
        count = len(trace)
        self._outcome = Outcome(np.zeros(count), np.zeros(count))
        self._starts: list[float] = [0.0] * count
        self._stops: list[float] = [0.0] * count
        self._durations: list[float] = trace.duration_s.tolist()
        self._queued = self._requests(devices_per_node)
        self._submitted = 0
        if order.by_owner:
            for team in set(trace.team):
                self._usage.know(team)

    def run(
        self, renew: Callable[[], None] | None, observe: Callable[[State], None] | None = None
    ) -> Outcome:
        """Handle all events in the order of time."""
        submit: list[float] = self._trace.submit_s.tolist()
        count, last, next_run, now = len(submit), submit[-1], 0, 0.0
        infinite = float("inf")
        while next_run < count or self._ends:
            arrival = submit[next_run] if next_run < count else infinite
            end = self._ends[0][0] if self._ends else infinite
            time = min(arrival, end)
            if self._waiting and self._free and now < last:
                self._count_blocked(now, min(time, last))
            now = time
            while self._ends and self._ends[0][0] <= now:
                self._end(heapq.heappop(self._ends)[1], now)
            while next_run < count and submit[next_run] <= now:
                self._waiting.add(self._queued[next_run])
                next_run += 1
            self._submitted = next_run
            if renew is not None:
                renew()
            self._resize(now)
            if self._waiting and self._free:
                self._pass(now)
                self._outcome.passes += 1
                if observe is not None and self._waiting:
                    observe(self._state(now))
        self._outcome.start_s = np.array(self._starts)
        self._outcome.end_s = np.array(self._stops)
        return self._outcome

    def _resize(self, now: float) -> None:
        """Change sizes of running runs, if they can change."""

    def _pass(self, now: float) -> None:
        gangs, waiting, reserves = self._gangs, self._waiting, self._order.reserves
        gangs.next_pass(now)
        groups = gangs.groups[POOL]
        for run in waiting.in_order(now, self._free):
            backfill = gangs.may_backfill(run)
            if not backfill and waiting.hopeless(run):
                continue
            if run.devices <= self._free and gangs.start(run, groups, backfill=backfill):
                self._started(run, now)
                if not self._free:
                    return
                continue
            waiting.failed(run, backfill=backfill or not reserves)
            if reserves and POOL not in gangs.reservations:
                gangs.reserve(run, groups)

    def _started(self, run: QueuedRun, now: float) -> None:
        self._waiting.remove(run)
        self._running[run.run] = run
        self._free -= run.devices
        self._starts[run.run] = now
        end = self._stops[run.run] = now + self._durations[run.run]
        heapq.heappush(self._ends, (end, run.run))
        if self._order.by_owner:
            self._usage.change(run.team, run.owner, run.devices, now)

    def _end(self, number: int, now: float) -> None:
        run = self._running.pop(number)
        self._gangs.release(run)
        self._free += run.devices
        if self._order.by_owner:
            self._usage.change(run.team, run.owner, -run.devices, now)

    def _count_blocked(self, now: float, until: float) -> None:
        first = self._waiting.first(now)
        if first is not None and first.least <= self._free and until > now:
            self._outcome.blocked_idle_s += self._free * (until - now)

    def _state(self, now: float) -> State:
        """Copies of the input of the policy."""
        ends = {
            number: (
                max(now, self._starts[number] + run.min_seconds),
                max(now, self._starts[number] + (run.max_seconds or 0.0)),
            )
            for number, run in self._running.items()
        }
        starts = {number: self._starts[number] for number in self._running}
        recent = self._queued[max(0, self._submitted - RECENT_RUNS) : self._submitted]
        recent = [run for run in recent if run.queued_at > 0]  # not those in progress at first
        return State(now, list(self._waiting), self._views(), ends, self._usage, recent, starts)

    def _views(self) -> list[NodeView]:
        """The nodes with their holders."""
        slots = {view.name: list(view.slots) for view in self._gangs.nodes}
        for number, shares in self._gangs.held().items():
            run, started = self._running[number], self._starts[number]
            for share in shares:
                for index in share.devices:
                    slots[share.node][index] = Slot(
                        index,
                        _KIND,
                        True,
                        number,
                        run.owner,
                        started + (run.max_seconds or 0.0),
                        started + run.min_seconds,
                        run.team,
                    )
        return [NodeView(name, POOL, tuple(each)) for name, each in slots.items()]

    def _requests(self, devices_per_node: int) -> list[QueuedRun]:
        """The runs as the policy sees them; limits hold for every prediction error."""
        trace, error = self._trace, PREDICTION_ERROR
        predicted = trace.predicted_s().tolist()
        known = self._durations if self._order.true_durations else predicted
        sizes: list[int] = trace.devices.tolist()
        together = {size: together_for(size, devices_per_node) for size in set(sizes)}
        return [
            QueuedRun(
                run=number,
                devices=size,
                pool=POOL,
                queued_at=submitted,
                priority=priority,
                owner=user,
                team=team,
                expected_s=known[number],
                max_seconds=predicted[number] / (1 - error),
                min_seconds=predicted[number] / (1 + error),
                together=together[size],
            )
            for number, (size, submitted, priority, user, team) in enumerate(
                zip(
                    sizes,
                    trace.submit_s.tolist(),
                    trace.priority.tolist(),
                    trace.user,
                    trace.team,
                    strict=True,
                )
            )
        ]
