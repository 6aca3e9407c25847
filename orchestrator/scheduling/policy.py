"""The scheduling policy: which queued runs get which devices now, and why each other run waits.

Gangs are placed completely or not at all, by priority, then by time in the queue. Smaller runs may
overtake a large one for a while; then devices are reserved for it. Pure: does not depend on a
database or on how attempts start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from orchestrator.scheduling.placement import reasons
from orchestrator.scheduling.placement.capacity import (
    DeviceGroup,
    NodeDevices,
    NodeView,
    Slot,
    groups_by_pool,
)

__all__ = ["Decision", "NodeView", "Placement", "QueuedRun", "Share", "Slot", "Wait", "place"]

# a run that has waited this long at the head of its pool gets the next devices
RESERVE_AFTER_S = 60.0
# reservations are considered for this many waiting runs per pool; those before may not need devices
RESERVATION_DEPTH = 8
ESTIMATE_LIMIT = 200  # waiting runs per pool whose start is estimated


@dataclass(frozen=True)
class QueuedRun:
    """A queued run; only `checkpoint_nodes`, if any, store its checkpoint."""

    run: int
    devices: int
    pool: str
    queued_at: float  # Unix seconds
    priority: int = 0
    owner: str = ""
    device: str | None = None
    not_before: float | None = None
    max_seconds: float | None = None
    checkpoint_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Share:
    """Devices of one node, by index."""

    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A run that starts now."""

    run: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Wait:
    """A run that waits; `may_start` (Unix seconds) is its latest start, None if unknown."""

    run: int
    position: int
    reason: str
    may_start: float | None = None


@dataclass(frozen=True)
class Decision:
    """Result of one pass: each queued run is placed or waits."""

    placements: tuple[Placement, ...] = ()
    waits: tuple[Wait, ...] = ()


def place(
    queue: Sequence[QueuedRun],
    nodes: Sequence[NodeView],
    now: datetime,
    *,
    quotas: Mapping[str, int] | None = None,
    pool_priority: Mapping[str, int] | None = None,
    estimated: int = ESTIMATE_LIMIT,
) -> Decision:
    """Decide for every queued run; equal input gives an equal decision.

    `quotas` limits the devices that one owner may hold per pool.
    """
    current = _Pass(
        sorted(nodes, key=lambda node: node.name),
        now.timestamp(),
        quotas or {},
        max(RESERVATION_DEPTH, estimated),
    )
    weight = pool_priority or {}
    for run in sorted(
        queue, key=lambda run: (-run.priority, -weight.get(run.pool, 0), run.queued_at, run.run)
    ):
        current.consider(run)
    return Decision(tuple(current.placements), tuple(current.waits))


@dataclass
class _Reservation:
    """The run that gets the next devices of its pool, and its latest start."""

    run: int
    start: float


class _Pass:
    """State of one pass, in memory."""

    def __init__(
        self, nodes: list[NodeView], now: float, quotas: Mapping[str, int], estimated: int
    ) -> None:
        self.placements: list[Placement] = []
        self.waits: list[Wait] = []
        self._nodes, self._now, self._quotas, self._estimated = nodes, now, quotas, estimated
        self._by_name = {node.name: node for node in nodes}
        self._groups = groups_by_pool(nodes, now)
        self._reservations: dict[str, _Reservation] = {}
        self._waiting: dict[str, int] = {}  # pool → waiting runs so far
        self._held: dict[tuple[str, str], int] = {}  # (pool, owner) → devices
        self._usage: dict[tuple[str, str], tuple[int, str]] = {}  # cache of `_get_usage`
        for node in nodes:
            for slot in node.slots:
                if slot.run is not None:
                    self._hold(node.pool, slot.owner, 1)

    def consider(self, run: QueuedRun) -> None:
        """Place the run, or record why it waits."""
        if run.not_before is not None and run.not_before > self._now:
            return self._wait(run, reasons.back_off(run.not_before), self._candidates(run))
        if blocked := self._blocked(run):
            return self._wait(run, blocked, [])
        groups, reservation = self._candidates(run), self._reservations.get(run.pool)
        # a run that ends before the reservation starts may use the reserved devices
        backfill = (
            reservation is not None
            and run.max_seconds is not None
            and self._now + run.max_seconds <= reservation.start
        )
        for group in groups:
            if nodes := group.fit(run.devices, run.checkpoint_nodes, backfill=backfill):
                return self._place(run, nodes)
        return self._wait(run, self._explain(run, groups, reservation), groups)

    def _blocked(self, run: QueuedRun) -> str:
        """Why the run may not start, however many devices are free; empty if it may."""
        used, quota = self._held.get((run.pool, run.owner), 0), self._quotas.get(run.pool)
        if quota is not None and used + run.devices > quota:
            return reasons.over_quota(run, quota, used)
        silent = [
            name
            for name in run.checkpoint_nodes
            if name in self._by_name and self._by_name[name].unusable_reason == "silent"
        ]
        return reasons.checkpoint_unavailable(run, silent) if silent else ""

    def _candidates(self, run: QueuedRun) -> list[DeviceGroup]:
        """Groups of the pool and kind; only the checkpoint's nodes while those are usable."""
        groups = [
            group for group in self._groups.get(run.pool, []) if run.device in (None, group.kind)
        ]
        if run.checkpoint_nodes and all(
            name in self._by_name and self._by_name[name].usable for name in run.checkpoint_nodes
        ):
            restricted = [group.on_nodes(run.checkpoint_nodes) for group in groups]
            return [group for group in restricted if group.nodes] or groups
        return groups

    def _place(self, run: QueuedRun, nodes: list[NodeDevices]) -> None:
        per_node = run.devices // len(nodes)
        until = self._now + run.max_seconds if run.max_seconds is not None else math.inf
        shares = tuple(Share(node.node, node.take(run.run, per_node, until)) for node in nodes)
        self.placements.append(Placement(run.run, shares))
        self._hold(run.pool, run.owner, run.devices)
        self._changed(run.pool)

    def _hold(self, pool: str, owner: str, devices: int) -> None:
        self._held[pool, owner] = self._held.get((pool, owner), 0) + devices

    def _wait(self, run: QueuedRun, reason: str, groups: list[DeviceGroup]) -> None:
        self._waiting[run.pool] = position = self._waiting.get(run.pool, 0) + 1
        start = None
        if position <= self._estimated:
            start = self._book(run, groups, may_reserve=position <= RESERVATION_DEPTH)
        self.waits.append(Wait(run.run, len(self.waits) + 1, reason, start))

    def _book(
        self, run: QueuedRun, groups: list[DeviceGroup], *, may_reserve: bool
    ) -> float | None:
        """Estimate the run's latest start and book its devices for the estimates of later runs.

        Reserves them if the run is the first of its pool that has waited for long.
        """
        options = [best for group in groups if (best := group.earliest(run.devices)) is not None]
        if not options:
            return None
        free_at, nodes = min(options, key=lambda item: item[0])
        ready = run.not_before or 0.0
        start, per_node = max(self._now, free_at, ready), run.devices // len(nodes)
        late = self._now - run.queued_at >= RESERVE_AFTER_S and ready <= self._now
        if may_reserve and late and run.pool not in self._reservations:
            self._reservations[run.pool] = _Reservation(run.run, start)
            for node in nodes:
                node.reserved = per_node
            self._changed(run.pool)
        end = start + run.max_seconds if run.max_seconds is not None else math.inf
        for node in nodes:
            node.book(per_node, end)
        return start if math.isfinite(start) else None

    def _changed(self, pool: str) -> None:
        for group in self._groups[pool]:
            group.changed()
        self._usage = {key: usage for key, usage in self._usage.items() if key[0] != pool}

    def _explain(
        self, run: QueuedRun, groups: list[DeviceGroup], reservation: _Reservation | None
    ) -> str:
        """Why no group fits the run."""
        if not groups:
            return reasons.no_devices(run, self._nodes)
        group = max(groups, key=lambda group: group.total)
        if group.total < run.devices:
            return reasons.too_few_devices(run, group.total, self._nodes)
        if not group.can_ever_fit(run.devices):
            return reasons.uneven(run, group.sizes, ever=True)
        free, holders = self._get_usage(run, group)
        if free >= run.devices:
            if reservation is not None and group.available(backfill=False) < free:
                return reasons.reserved(run, reservation.run, free)
            return reasons.uneven(run, group.free_counts, ever=False)
        return reasons.busy(run, free, group.total, holders)

    def _get_usage(self, run: QueuedRun, group: DeviceGroup) -> tuple[int, str]:
        """Free devices and a description of the holders, cached for runs without a checkpoint."""
        key = (run.pool, group.kind)
        if not run.checkpoint_nodes and key in self._usage:
            return self._usage[key]
        holders: dict[int, int] = {}
        for node in group.nodes:
            for holder, count in node.holders.items():
                holders[holder] = holders.get(holder, 0) + count
        usage = group.available(backfill=True), reasons.describe_holders(holders)
        if not run.checkpoint_nodes:
            self._usage[key] = usage
        return usage
