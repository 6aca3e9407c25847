"""Estimates when waiting runs start, by simulating the queue as it is with the scheduler's policy.

Each sample draws durations around the predicted ones and submits runs like those of the recent
past. The estimate is the median, the interval covers 80% of the samples. Pure; does not depend on
Django.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.ordering.guarantees import PerTeam, guaranteed_first, held_by_team
from orchestrator.scheduling.ordering.orders import ORDERS, Order
from orchestrator.scheduling.policy import (
    Decision,
    NodeView,
    Placement,
    QueuedRun,
    Slot,
    in_order,
    place,
)

MOST_RUNS = 200  # first in the queue
MOST_ARRIVALS = 200  # of one sample
SAMPLES = 32  # at most; fewer if their time is over
BUDGET_S = 2.0  # time of the samples in the job that estimates the queue
SHORT_LIMIT_S = 600.0  # a time limit that `sooner` proposes
ERROR = 0.2  # relative error of predicted durations that samples assume


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a waiting run starts, in Unix seconds; 80% of the samples lie from `low` to `high`."""

    start: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Policy:
    """What `place` needs besides queue and nodes."""

    quotas: Mapping[str, int]
    team_quotas: Mapping[str, int]
    pool_priority: Mapping[str, int]
    usage: DecayedUsage
    order: Order = ORDERS["orrery"]
    guarantees: PerTeam = field(default_factory=dict)

    def first(
        self, queue: Sequence[QueuedRun], nodes: Sequence[NodeView], now: float
    ) -> list[QueuedRun]:
        """The first `MOST_RUNS` runs in the order in which the policy tries them."""
        ordered = in_order(queue, self.order, self.usage, self.pool_priority, now)
        return guaranteed_first(ordered, self.guarantees, held_by_team(nodes), now)[:MOST_RUNS]

    def decide(self, queue: Sequence[QueuedRun], nodes: Sequence[NodeView], now: float) -> Decision:
        """One pass of the scheduler."""
        return place(
            queue,
            nodes,
            datetime.fromtimestamp(now, UTC),
            quotas=self.quotas,
            team_quotas=self.team_quotas,
            pool_priority=self.pool_priority,
            guarantees=self.guarantees,
            usage=self.usage,
            order=self.order,
            estimated=0,
            explained=False,
        )


def estimate_starts(
    queue: Sequence[QueuedRun],
    nodes: Sequence[NodeView],
    now: float,
    *,
    policy: Policy,
    ends: Mapping[int, tuple[float, float]],
    recent: Sequence[QueuedRun] = (),
    samples: int = SAMPLES,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, Estimate]:
    """Estimates of the first `MOST_RUNS` waiting runs; omits those whose start is unknown.

    `ends` maps running runs to the interval of their ends; others are assumed to run on. `recent`
    are the runs submitted last, in that order: each sample submits them again at the same
    intervals, from a random one on. After `budget_s` no further sample is drawn.
    """
    first = policy.first(queue, nodes, now)
    deadline = clock() + budget_s

    def within() -> bool:
        return clock() < deadline

    starts: dict[int, list[float]] = {run.run: [] for run in first}
    draws = _Draws(random.Random(0), samples)
    for number in range(samples):
        if number and not within():
            break
        draws.sample = number
        arrivals = _future(recent, now, draws.rng)
        sample = _sample(first, nodes, now, policy, ends, draws, arrivals, within)
        for run, start in sample.items():
            if run in starts:
                starts[run].append(start)
    return {run: _estimate(values) for run, values in starts.items() if values}


class _Draws:
    """Uniform numbers in [0, 1) of each run: stratified, so that few samples cover the range.

    The numbers of one run in all samples lie in as many equal parts of the range, in random order
    (McKay, Beckman, Conover 1979, Latin hypercube sampling).
    """

    def __init__(self, rng: random.Random, samples: int) -> None:
        self.rng, self.sample = rng, 0
        self._samples = samples
        self._parts: dict[int, list[int]] = {}

    def of(self, run: int) -> float:
        """The number of a run in this sample."""
        if run not in self._parts:
            self._parts[run] = self.rng.sample(range(self._samples), self._samples)
        return (self._parts[run][self.sample] + self.rng.random()) / self._samples


def _estimate(values: list[float]) -> Estimate:
    ordered = sorted(values)
    median, low, high = (_quantile(ordered, share) for share in (0.5, 0.1, 0.9))
    return Estimate(median, low, high, len(values))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Of a few samples: the k-th of n is the quantile k / (n + 1), bounded by first and last."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _future(recent: Sequence[QueuedRun], now: float, rng: random.Random) -> list[QueuedRun]:
    """Runs that may be submitted from now on: the recent ones again, with negative numbers."""
    if len(recent) < 2 or recent[-1].queued_at <= recent[0].queued_at:
        return []
    first = rng.randrange(len(recent))
    gap = (recent[-1].queued_at - recent[0].queued_at) / (len(recent) - 1)
    time, runs = now + gap * rng.random(), []
    for number in range(MOST_ARRIVALS):
        place = (first + number) % len(recent)
        run = recent[place]
        if number:
            before = recent[place - 1].queued_at if place else run.queued_at - gap
            time += max(0.0, run.queued_at - before)
        runs.append(replace(run, run=-1 - number, queued_at=time, not_before=None))
    return runs


def _sample(
    waiting: Sequence[QueuedRun],
    nodes: Sequence[NodeView],
    now: float,
    policy: Policy,
    between: Mapping[int, tuple[float, float]],
    draws: _Draws,
    arrivals: Sequence[QueuedRun],
    may_continue: Callable[[], bool],
) -> dict[int, float]:
    """The start of each run, of one draw; the first ones only if it may not continue."""
    cluster = _Cluster(nodes)
    ends = []
    for run_id in cluster.running:
        if run_id in between:
            low, high = between[run_id]
            ends.append((max(now, low + (high - low) * draws.of(run_id)), run_id))
    heapq.heapify(ends)
    left = {run.run: run for run in waiting}
    undecided, submitted = {run.run for run in waiting}, 0
    starts: dict[int, float] = {}
    ready = sorted(
        {run.not_before for run in waiting if run.not_before and run.not_before > now}
        | {window.end for node in nodes for window in node.windows if window.end > now}
    )
    time = now
    while undecided and may_continue():
        decided: tuple[Placement, ...] = ()
        if cluster.free:
            decided = policy.decide(list(left.values()), cluster.views(), time).placements
        for placement in decided:
            run = left.pop(placement.run).at(placement.devices)
            starts[run.run] = time
            error = ERROR * (2 * (draws.of(run.run) if run.run >= 0 else draws.rng.random()) - 1)
            lasts = max(1.0, (run.expected_s or math.inf) / (1 + error))
            undecided.discard(run.run)
            early = time + run.min_seconds
            until = time + run.max_seconds if run.max_seconds is not None else None
            for share in placement.shares:
                cluster.hold(run, share.node, share.devices, until, early)
            if math.isfinite(lasts):
                heapq.heappush(ends, (time + lasts, run.run))
        following = min(
            ends[0][0] if ends else math.inf,
            ready[0] if ready else math.inf,
            arrivals[submitted].queued_at if submitted < len(arrivals) else math.inf,
        )
        if not math.isfinite(following):
            break
        time = following
        while ends and ends[0][0] <= time:
            cluster.release(heapq.heappop(ends)[1])
        while ready and ready[0] <= time:
            ready.pop(0)
        while submitted < len(arrivals) and arrivals[submitted].queued_at <= time:
            left[arrivals[submitted].run] = arrivals[submitted]
            submitted += 1
    return starts


class _Cluster:
    """Nodes whose devices change hands."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._where: dict[int, set[str]] = {}
        for node in nodes:
            for slot in node.slots:
                if slot.run is not None:
                    self._where.setdefault(slot.run, set()).add(node.name)
        self.running = list(self._where)
        self.free = sum(slot.run is None for node in nodes if node.usable for slot in node.slots)

    def views(self) -> list[NodeView]:
        return list(self._nodes.values())

    def hold(
        self,
        run: QueuedRun,
        node: str,
        devices: Sequence[int],
        until: float | None,
        early: float,
    ) -> None:
        self._where.setdefault(run.run, set()).add(node)
        taken = set(devices)

        self._free_more(node, -len(taken))

        def given(slot: Slot) -> Slot:
            return replace(
                slot, run=run.run, owner=run.owner, team=run.team, until=until, early=early
            )

        self._change(node, lambda slot: given(slot) if slot.index in taken else slot)

    def release(self, run: int) -> None:
        for node in self._where.pop(run, ()):
            self._free_more(node, sum(slot.run == run for slot in self._nodes[node].slots))
            self._change(
                node,
                lambda slot: Slot(slot.index, slot.kind, slot.gpu) if slot.run == run else slot,
            )

    def _free_more(self, node: str, devices: int) -> None:
        if self._nodes[node].usable:
            self.free += devices

    def _change(self, name: str, change: Callable[[Slot], Slot]) -> None:
        node = self._nodes[name]
        self._nodes[name] = replace(node, slots=tuple(change(slot) for slot in node.slots))


def sooner(
    queue: Sequence[QueuedRun],
    nodes: Sequence[NodeView],
    now: float,
    *,
    policy: Policy,
    sizes: Mapping[int, Sequence[int]],
    most: int = 20,
) -> dict[int, str]:
    """What would start a waiting run now: fewer devices or a time limit, by asking the policy.

    `sizes` are the smaller numbers of devices with which a run's plan works, largest first. Tries
    the first `most` runs.
    """
    free = sum(slot.run is None for node in nodes if node.usable for slot in node.slots)
    answers: dict[int, str] = {}
    if not free:
        return answers
    first = policy.first(queue, nodes, now)
    for place_in_queue, run in enumerate(first[:most]):
        smaller = [size for size in sizes.get(run.run, ()) if size <= free][:3]
        options = [
            (replace(run, devices=size, smaller=()), f"With {size} devices: now.")
            for size in smaller
        ]
        limit = SHORT_LIMIT_S
        if run.devices <= free and (run.max_seconds is None or run.max_seconds > limit):
            text = f"With a time limit of {limit / 60:.0f} min: now."
            options.append((replace(run, max_seconds=limit), text))
        for changed, text in options:
            tried = [*first[:place_in_queue], changed, *first[place_in_queue + 1 :]]
            placed = policy.decide(tried, nodes, now).placements
            if any(placement.run == run.run for placement in placed):
                answers[run.run] = text
                break
    return answers
