"""Grows elastic runs that hold fewer devices than they may, when devices stay free.

A run gets the usual notice, saves a checkpoint and continues on the size that the policy would give
it now. It does not grow while another run that may use the devices waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from django.conf import settings

from orchestrator.runs.models import Attempt
from orchestrator.scheduling.placement import elastic_runs, snapshot
from orchestrator.scheduling.placement.capacity import NodeView
from orchestrator.scheduling.placement.elastic_runs import ElasticRun
from orchestrator.scheduling.preemption.requests import request
from orchestrator.scheduling.preemption.resizing import saves_time
from workers.contracts.wire.node_messages import AttemptState, RunState

EVERY_S: Final = 5.0  # between two checks
MOST_TRIED: Final = 8  # runs per check; each asks the policy about the whole queue


@dataclass
class Growth:
    """Since when each run could grow without interruption; in the memory of one scheduler."""

    since: dict[int, datetime] = field(default_factory=dict)
    checked: datetime | None = None

    def grow(self, *, now: datetime) -> list[int]:
        """Request the growth of runs that could grow for long enough; at most one per pool."""
        if self.checked is not None and (now - self.checked).total_seconds() < EVERY_S:
            return []
        self.checked = now
        if not _any_below_its_size():
            self.since.clear()
            return []
        current = snapshot.take(always=True)
        runs = elastic_runs.open_runs(current.shares)
        sizes = larger_sizes(current, runs, now)
        self.since = {run: self.since.get(run, now) for run in sizes}
        grown, pools = [], set[str]()
        for run, size in sizes.items():
            pool = runs[run].queued.pool
            if pool not in pools and self._is_due(runs[run], now):
                need = f"{size - runs[run].devices} more devices are free for it."
                if request(run, by=None, need=need, resize="free_devices"):
                    pools.add(pool)
                    grown.append(run)
        return grown

    def _is_due(self, run: ElasticRun, now: datetime) -> bool:
        """Whether devices were free for long enough, and the run has its size for long enough."""
        free_s = (now - self.since[run.queued.run]).total_seconds()
        age_s = (now - run.started).total_seconds() if run.started is not None else 0.0
        return free_s >= settings.ENV.grow_after_s and age_s >= settings.ENV.grow_every_s


def larger_sizes(
    current: snapshot.Snapshot, runs: Mapping[int, ElasticRun], now: datetime
) -> dict[int, int]:
    """`{run: size}` of the runs that would get more devices if they continued now.

    The highest priority first, then the one that lacks the largest part of its size. None in a pool
    in which an elastic run starts or stops.
    """
    changing = {run.queued.pool for run in runs.values() if not run.running}
    changing |= {run.pool for run in current.queue if run.keeps_place}
    free = dict[str, int]()
    for node in current.nodes if runs else ():
        idle = sum(slot.run is None for slot in node.slots) if node.usable else 0
        free[node.pool] = free.get(node.pool, 0) + idle
    candidates = sorted(
        (run for run in runs.values() if run.queued.pool not in changing and _may_grow(run, free)),
        key=lambda run: (-run.queued.priority, run.devices / run.queued.devices, run.queued.run),
    )[:MOST_TRIED]
    return {
        run.queued.run: size
        for run in candidates
        if (size := size_now(current, run, now)) > run.devices and is_worth(run, size)
    }


def _may_grow(run: ElasticRun, free: Mapping[str, int]) -> bool:
    """Whether its pool has enough free devices for its next size, wherever they are."""
    larger = [size for size in run.queued.sizes if size > run.devices]
    return bool(larger) and free.get(run.queued.pool, 0) >= larger[-1] - run.devices


def size_now(current: snapshot.Snapshot, run: ElasticRun, now: datetime) -> int:
    """The size that the policy gives the run if it is queued to continue, next to all that wait."""
    nodes = without(current.nodes, run.queued.run)
    decision = current.decide(now, estimated=0, queue=[*current.queue, run.queued], nodes=nodes)
    placed = {placement.run: placement.devices for placement in decision.placements}
    return placed.get(run.queued.run, 0)


def is_worth(run: ElasticRun, size: int) -> bool:
    """Whether the run saves more time on the larger size than its restart takes."""
    larger = next((each.slowdown for each in run.queued.smaller if each.devices == size), 1.0)
    return saves_time(run.left_s, slowdown=run.slowdown, larger=larger)


def without(nodes: Sequence[NodeView], run: int) -> list[NodeView]:
    """The nodes as if the run held nothing."""
    return [
        replace(
            node,
            slots=tuple(
                replace(slot, run=None, owner="", until=None, early=None, team="")
                if slot.run == run
                else slot
                for slot in node.slots
            ),
        )
        if any(slot.run == run for slot in node.slots)
        else node
        for node in nodes
    ]


def _any_below_its_size() -> bool:
    """Whether an elastic run holds fewer devices than it may."""
    rows = Attempt.objects.filter(
        state=AttemptState.RUNNING, run__state=RunState.RUNNING, run__sizes__isnull=False
    )
    return any(
        sum(len(share["devices"]) for share in placement) < most
        for placement, most in rows.values_list("placement", "run__devices")
    )
