"""The scheduling policy: which queued runs get which devices now, and why each other run waits.

Gangs are placed completely or not at all, by priority, then by time in the queue. A gang that waits
reserves the next devices; other runs use them only if that cannot delay it, even if holders end
earlier than their limits. An elastic run starts at its smallest size, and gets more devices when
all runs of its priority have been tried. Pure: does not depend on a database.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.ordering.guarantees import PerTeam, held_by_team, split_by_guarantee
from orchestrator.scheduling.ordering.orders import ORDERS, Order, Rank, effective_priority
from orchestrator.scheduling.placement import reasons
from orchestrator.scheduling.placement.capacity import (
    DeviceGroup,
    NodeDevices,
    NodeView,
    Slot,
    Window,
    could_fit,
)
from orchestrator.scheduling.placement.gangs import Gangs, Reservation
from orchestrator.scheduling.placement.requests import (
    Decision,
    Placement,
    QueuedRun,
    Share,
    Wait,
)

__all__ = [
    "Decision",
    "NodeView",
    "Placement",
    "QueuedRun",
    "Share",
    "Slot",
    "Wait",
    "Window",
    "place",
]

# a run that has waited this long at the head of its pool gets the next devices
RESERVE_AFTER_S = 5.0
# of the waiting runs of a pool that lack only devices, this many may reserve some
RESERVATION_DEPTH = 8
# runs per pool that are tried, after those in back-off or over their quota
QUEUE_LIMIT = 2000
ESTIMATE_LIMIT = 50  # waiting runs per pool whose start is estimated


def place(
    queue: Sequence[QueuedRun],
    nodes: Sequence[NodeView],
    now: datetime,
    *,
    quotas: Mapping[str, int] | None = None,
    team_quotas: Mapping[str, int] | None = None,
    pool_priority: Mapping[str, int] | None = None,
    guarantees: PerTeam | None = None,
    usage: DecayedUsage | None = None,
    order: Order = ORDERS["orrery"],
    estimated: int = ESTIMATE_LIMIT,
    explained: bool = True,
) -> Decision:
    """Decide for every queued run; equal input gives an equal decision.

    `quotas` limits the devices that one owner may hold per pool, `team_quotas` those that a team
    may hold in all pools. `guarantees` are the devices that a team gets first, per pool. `usage` is
    the past device time of the teams. Reasons are empty unless `explained`; placements are equal.
    """
    time = now.timestamp()
    current = _Pass(
        sorted(nodes, key=lambda node: node.name), time, quotas or {}, estimated, explained
    )
    current.limit_teams(team_quotas or {})
    ordered = in_order(queue, order, usage or DecayedUsage(), pool_priority or {}, time)
    for run in (each for each in ordered if each.keeps_place):
        current.consider(run)
    others = [run for run in ordered if not run.keeps_place]
    if guarantees:
        held = held_by_team(nodes)
        guaranteed, others = split_by_guarantee(others, guarantees, held, time, current.claim)
        for run in guaranteed:
            current.consider(run)
    for run in others:
        if order.by_priority:
            current.enlarge(above=effective_priority(run.priority, run.queued_at, time))
        current.consider(run)
    current.enlarge()
    return Decision(tuple(current.placements), tuple(current.waits))


def in_order(
    queue: Sequence[QueuedRun],
    order: Order,
    usage: DecayedUsage,
    pool_priority: Mapping[str, int],
    now: float,
) -> list[QueuedRun]:
    """The runs in the order in which the policy tries them."""
    ranks: dict[tuple[str, str], Rank] = {}

    def key(run: QueuedRun) -> tuple[float, ...]:
        owner = run.team, run.owner
        if owner not in ranks:
            ranks[owner] = order.rank(usage, run.team, run.owner, now)
        first, second, later = ranks[owner]
        priority = effective_priority(run.priority, run.queued_at, now) if order.by_priority else 0
        weight = pool_priority.get(run.pool, 0)
        return -priority, -weight, first, second, order.base(run) + later, run.queued_at, run.run

    return sorted(queue, key=key)


# pool, identity of excluded nodes, backfill, devices, kind, needs, together
_Request = tuple[str, int, bool, int, str | None, tuple[str, ...], int]


class _Held(NamedTuple):
    """Devices that count for quotas."""

    by_owner: dict[tuple[str, str], int]  # (pool, owner)
    by_team: dict[str, int]

    def add(self, pool: str, owner: str, team: str, devices: int) -> None:
        """Count these devices too."""
        self.by_owner[pool, owner] = self.by_owner.get((pool, owner), 0) + devices
        self.by_team[team] = self.by_team.get(team, 0) + devices


class _Pass:
    """State of one pass, in memory."""

    def __init__(
        self,
        nodes: list[NodeView],
        now: float,
        quotas: Mapping[str, int],
        estimated: int,
        explained: bool,
    ) -> None:
        self.placements: list[Placement] = []
        self.waits: list[Wait] = []
        self._now, self._quotas, self._estimated = now, quotas, estimated
        self._explained = explained
        self._gangs = Gangs(nodes, now)
        self._elastic: list[tuple[int, QueuedRun]] = []  # index of the placement, run
        self._waiting: dict[str, int] = {}  # pool → waiting runs so far
        self._tried: dict[str, int] = {}  # pool → runs that were tried
        self._contending: dict[str, int] = {}  # pool → those that lack only devices
        self._held = _Held({}, {})
        self._claims: _Held | None = None  # with the runs that `claim` admitted
        self._team_quotas: Mapping[str, int] = {}
        self._usage: dict[tuple[str, str], tuple[int, str]] = {}  # cache of `_get_usage`
        self._fits: dict[_Request, bool] = {}  # cache of `_fits_without_windows`
        # identity of excluded nodes, which `Gangs` holds → the first window and its nodes
        self._first_windows: dict[int, tuple[Window, list[str]]] = {}
        for node in nodes:
            for slot in node.slots:
                if slot.run is not None:
                    self._held.add(node.pool, slot.owner, slot.team, 1)

    def limit_teams(self, quotas: Mapping[str, int]) -> None:
        """Devices that each team may hold; other teams have no limit."""
        self._team_quotas = quotas

    def claim(self, run: QueuedRun) -> bool:
        """Whether the run, after those claimed before, could start if enough devices were free."""
        if self._claims is None:
            self._claims = _Held(dict(self._held.by_owner), dict(self._held.by_team))
        least = run.smallest
        if self._blocked(least, self._claims):
            return False
        groups = self._gangs.candidates(least)
        if not any(group.can_ever_fit(least.devices, run.together) for group in groups):
            return False
        self._claims.add(run.pool, run.owner, run.team, least.devices)
        return True

    def consider(self, elastic: QueuedRun) -> None:
        """Place the run, or record why it waits; an elastic one at its smallest size."""
        gangs, run = self._gangs, elastic.smallest
        if run.not_before is not None and run.not_before > self._now:
            return self._wait(run, reasons.back_off(run.not_before), gangs.candidates(run))
        if blocked := self._blocked(run, self._held):
            return self._wait(run, blocked, None)
        self._tried[run.pool] = tried = self._tried.get(run.pool, 0) + 1
        if tried > QUEUE_LIMIT:
            return self._wait(run, reasons.behind(run, QUEUE_LIMIT), None)
        groups = gangs.candidates(run)
        if shares := gangs.start(run, groups, backfill=gangs.may_backfill(run)):
            if elastic.smaller:
                self._elastic.append((len(self.placements), elastic))
            self.placements.append(Placement(run.run, shares))
            self._held.add(run.pool, run.owner, run.team, run.devices)
            return self._changed(run.pool)
        reservation = gangs.reservations.get(run.pool)
        reason = self._explain(run, groups, reservation) if self._explained else ""
        possible = any(group.can_ever_fit(run.devices, run.together) for group in groups)
        return self._wait(run, reason, groups, lacks_devices=possible)

    def enlarge(self, above: int | None = None) -> None:
        """Give the elastic runs that were placed the largest sizes for which devices are free.

        Only those of a priority `above` this one, if given: the others wait until all runs of
        their priority have been tried.
        """
        later = []
        for index, run in self._elastic:
            if above is not None and run.priority <= above:
                later.append((index, run))
            else:
                self._enlarge(index, run)
        self._elastic = later

    def _enlarge(self, index: int, run: QueuedRun) -> None:
        gangs, used = self._gangs, self.placements[index]
        # other nodes cannot read its checkpoint
        bound = set(run.checkpoint_nodes) if self._continues(run, used) else None
        self._held.add(run.pool, run.owner, run.team, -used.devices)
        for devices in run.sizes[:-1]:
            larger = run.at(devices)
            if self._blocked(larger, self._held):
                continue
            larger_fits = gangs.enlarge(larger, within=bound)
            used = self.placements[index] = Placement(run.run, gangs.held()[run.run])
            if larger_fits:
                break
        self._held.add(run.pool, run.owner, run.team, used.devices)
        self._changed(run.pool)

    @staticmethod
    def _continues(run: QueuedRun, placement: Placement) -> bool:
        """Whether the placement is on the nodes that store the run's checkpoint."""
        return bool(run.checkpoint_nodes) and {share.node for share in placement.shares} <= set(
            run.checkpoint_nodes
        )

    def _blocked(self, run: QueuedRun, held: _Held) -> str:
        """Why the run may not start, however many devices are free; empty if it may."""
        if run.server:
            return run.server
        used, quota = held.by_owner.get((run.pool, run.owner), 0), self._quotas.get(run.pool)
        if quota is not None and used + run.devices > quota:
            return reasons.over_quota(run.devices, run.pool, run.owner, quota, used)
        if run.team in self._team_quotas:
            quota, used = self._team_quotas[run.team], held.by_team.get(run.team, 0)
            if used + run.devices > quota:
                return reasons.over_team_quota(run.devices, run.team, quota, used)
        holders = [
            self._gangs.by_name[name]
            for name in run.checkpoint_nodes
            if name in self._gangs.by_name
        ]
        silent = [node.name for node in holders if node.unusable_reason == "silent"]
        if not could_fit(holders, run.devices, run.device):
            return ""
        return reasons.checkpoint_unavailable(run, silent) if silent else ""

    def _wait(
        self,
        run: QueuedRun,
        reason: str,
        groups: list[DeviceGroup] | None,
        *,
        lacks_devices: bool = False,
    ) -> None:
        self._waiting[run.pool] = position = self._waiting.get(run.pool, 0) + 1
        start = None
        reserved = run.pool in self._gangs.reservations
        undecided = not reserved and (run.not_before or 0.0) <= self._now
        may_reserve = lacks_devices and undecided
        if groups is not None and (
            position <= self._estimated
            or (may_reserve and self._contending.get(run.pool, 0) < RESERVATION_DEPTH)
        ):
            start = self._book(run, groups)
        self.waits.append(Wait(run.run, len(self.waits) + 1, reason, start, lacks_devices))

    def _book(self, run: QueuedRun, groups: list[DeviceGroup]) -> float | None:
        """Estimate the run's latest start and book its devices for the estimates of later runs.

        Reserves them if the run is the first of its pool that lacks only devices and is late.
        """
        best = self._gangs.earliest(run, groups)
        if best is None:
            return None
        free_at, nodes = best
        ready = run.not_before or 0.0
        start, per_node = max(self._now, free_at, ready), run.devices // len(nodes)
        if not any(group.can_ever_fit(run.devices, run.together) for group in groups):
            return start if math.isfinite(start) else None  # windows exclude it until then
        if ready <= self._now:
            self._reserve(run, groups, nodes)
        end = start + run.max_seconds if run.max_seconds is not None else math.inf
        for node in nodes:
            node.book(per_node, end)
        return start if math.isfinite(start) else None

    def _reserve(self, run: QueuedRun, groups: list[DeviceGroup], nodes: list[NodeDevices]) -> None:
        self._contending[run.pool] = number = self._contending.get(run.pool, 0) + 1
        if (
            number > RESERVATION_DEPTH
            or self._now - run.queued_at < RESERVE_AFTER_S
            or run.pool in self._gangs.reservations
        ):
            return
        self._gangs.reserve(run, groups, nodes)
        self._changed(run.pool)

    def _changed(self, pool: str) -> None:
        self._usage = {key: usage for key, usage in self._usage.items() if key[0] != pool}
        self._fits = {key: fits for key, fits in self._fits.items() if key[0] != pool}

    def _explain(
        self, run: QueuedRun, groups: list[DeviceGroup], reservation: Reservation | None
    ) -> str:
        """Why no group fits the run."""
        if (excluded := self._gangs.excluded(run)) and self._fits_without_windows(run, groups):
            if id(excluded) not in self._first_windows:
                self._first_windows[id(excluded)] = reasons.first_window(excluded)
            return reasons.window(run, *self._first_windows[id(excluded)], now=self._now)
        if run.needs and not groups and (lacking := self._lacking(run)):
            return reasons.unsupported(run, lacking)
        if not groups:
            return reasons.no_devices(run, self._gangs.nodes)
        group = max(groups, key=lambda group: group.total)
        if group.total < run.devices:
            return reasons.too_few_devices(run, group.total, self._gangs.nodes)
        if not group.can_ever_fit(run.devices, run.together):
            return reasons.uneven(run, group.sizes, ever=True)
        free, holders = self._get_usage(run, group)
        if run.checkpoint_nodes:
            names = [node.node for node in group.nodes]
            if set(names) <= set(run.checkpoint_nodes):
                return reasons.checkpoint_busy(run, names, free, group.total, holders)
        if avoided := self._avoided(run, groups):
            return reasons.avoiding(run, avoided, free, group.total, holders)
        if free >= run.devices:
            if reservation is not None and group.available(backfill=False) < free:
                return reasons.reserved(run, reservation.run, free)
            return reasons.uneven(run, group.free_counts, ever=False)
        return reasons.busy(run, free, group.total, holders)

    def _fits_without_windows(self, run: QueuedRun, groups: list[DeviceGroup]) -> bool:
        """Whether the run would fit now, or could fit at all, if no node had a window."""
        if run.checkpoint_nodes or run.avoid:
            return self._fits_everywhere(run, groups)
        backfill, excluded = self._gangs.may_backfill(run), id(self._gangs.excluded(run))
        key = run.pool, excluded, backfill, run.devices, run.device, run.needs, run.together
        if key not in self._fits:
            self._fits[key] = self._fits_everywhere(run, groups)
        return self._fits[key]

    def _fits_everywhere(self, run: QueuedRun, groups: list[DeviceGroup]) -> bool:
        gangs = self._gangs
        everywhere = gangs.candidates(run, windows=False)
        if any(
            group.fit(run.devices, (), backfill=gangs.may_backfill(run), together=run.together)
            for group in everywhere
        ):
            return True
        return any(
            group.can_ever_fit(run.devices, run.together) for group in everywhere
        ) and not any(group.can_ever_fit(run.devices, run.together) for group in groups)

    def _lacking(self, run: QueuedRun) -> list[str]:
        """What no usable node of the pool with the run's kind of device supports."""
        kind = run.device
        usable = [
            node
            for node in self._gangs.nodes
            if node.pool == run.pool
            and node.usable
            and any(kind in (None, slot.kind) for slot in node.slots)
        ]
        able = [node for node in usable if set(run.needs) <= node.supports]
        return [need for need in run.needs] if usable and not able else []

    def _avoided(self, run: QueuedRun, groups: list[DeviceGroup]) -> list[str]:
        """Nodes that the run could use but avoids; empty if it avoids none."""
        if not run.avoid or run.avoid_until is None or self._now >= run.avoid_until:
            return []
        used = {node.node for group in groups for node in group.nodes}
        pool = {node.node for group in self._gangs.groups.get(run.pool, []) for node in group.nodes}
        return sorted((set(run.avoid) & pool) - used)

    def _get_usage(self, run: QueuedRun, group: DeviceGroup) -> tuple[int, str]:
        """Free devices and a description of the holders, cached for runs that may use all nodes."""
        special = run.checkpoint_nodes or run.avoid or run.needs
        key, all_nodes = (run.pool, group.kind), not special
        if all_nodes and key in self._usage:
            return self._usage[key]
        holders: dict[int, int] = {}
        for node in group.nodes:
            for holder, count in node.holders.items():
                holders[holder] = holders.get(holder, 0) + count
        usage = group.available(backfill=True), reasons.describe_holders(holders)
        if all_nodes:
            self._usage[key] = usage
        return usage
