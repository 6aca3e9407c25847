"""Starts gangs on free devices and reserves the next devices for the run that waits first.

The same object serves one pass of the scheduler, or many passes of a simulation. Does not depend on
the order of the runs, on quotas or on wait reasons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.scheduling.placement.capacity import (
    Delay,
    DeviceGroup,
    NodeDevices,
    NodeView,
    Window,
    groups_by_pool,
)
from orchestrator.scheduling.placement.requests import QueuedRun, Share


@dataclass(frozen=True, slots=True)
class Reservation:
    """The run that gets the next devices of its pool, and the earliest time it may start."""

    run: int
    start: float
    nodes: list[NodeDevices]
    per_node: int


@dataclass(frozen=True, slots=True)
class _Held:
    """What a started run holds, and between when it ends."""

    nodes: list[NodeDevices]
    shares: tuple[Share, ...]
    until: float
    early: float


# pool, what the nodes support, identity of the excluded nodes or 0
_Special = tuple[str, tuple[str, ...], int]
_NONE: Final[Mapping[str, Window]] = {}


class Gangs:
    """Devices of a fleet: which gangs fit now, and which devices are reserved."""

    def __init__(self, nodes: Sequence[NodeView], now: float) -> None:
        self.now = now
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.by_name = {node.name: node for node in self.nodes}
        self.groups = groups_by_pool(self.nodes, now)
        self.reservations: dict[str, Reservation] = {}
        self._special: dict[_Special, list[DeviceGroup]] = {}  # `_supporting`
        self._windows: dict[str, dict[str, tuple[Window, ...]]] = {}  # pool → node → by start
        for node in self.nodes:
            if node.windows:
                self._windows.setdefault(node.pool, {})[node.name] = node.windows
        # caches of `excluded`: windows per pool, nodes per request, nodes per pool and windows
        self._distinct: dict[str, frozenset[Window]] = {}
        self._excluded: dict[tuple[str, str, float], Mapping[str, Window]] = {}
        self._closed: dict[tuple[str, frozenset[Window]], Mapping[str, Window]] = {}
        self._held: dict[int, _Held] = {}
        self._known: dict[str, Reservation] = {}  # pool → reservation of the previous pass

    def next_pass(self, now: float) -> None:
        """Begin another pass at a later time: reservations are decided again."""
        self.now = now
        self._excluded.clear()
        if self.reservations:
            for pool, reservation in self.reservations.items():
                for node in reservation.nodes:
                    node.reserved = 0
                self._changed(pool, reservation.nodes)
            self._known, self.reservations = self.reservations, {}

    def excluded(self, run: QueuedRun) -> Mapping[str, Window]:
        """Nodes of the pool that the run may not use now, because it may last into a window.

        The same object for runs that the same windows exclude.
        """
        if run.pool not in self._windows:
            return _NONE
        key = run.pool, run.team, run.longest_s
        if key not in self._excluded:
            of_nodes = self._windows[run.pool]
            if run.pool not in self._distinct:
                self._distinct[run.pool] = frozenset(itertools.chain(*of_nodes.values()))
            windows = frozenset(
                window
                for window in self._distinct[run.pool]
                if window.excludes(run.team, self.now, run.longest_s)
            )
            if (run.pool, windows) not in self._closed:
                self._closed[run.pool, windows] = {
                    name: window
                    for name, its in of_nodes.items()
                    for window in its[::-1]  # the first one stays
                    if window in windows
                }
            self._excluded[key] = self._closed[run.pool, windows]
        return self._excluded[key]

    def candidates(self, run: QueuedRun, *, windows: bool = True) -> list[DeviceGroup]:
        """Groups of the pool and kind; only the checkpoint's nodes if they can fit the run.

        Leaves out nodes with a window that the run may last into, unless `windows` is false.
        """
        groups = self._supporting(run, self.excluded(run) if windows else _NONE)
        if run.device is not None:
            groups = [group for group in groups if run.device == group.kind]
        if run.checkpoint_nodes and all(
            name in self.by_name and self.by_name[name].usable for name in run.checkpoint_nodes
        ):
            restricted = [group.on_nodes(run.checkpoint_nodes) for group in groups]
            if fitting := [
                group for group in restricted if group.can_ever_fit(run.devices, run.together)
            ]:
                return fitting
        if run.avoid and run.avoid_until is not None and self.now < run.avoid_until:
            others = [group.without(run.avoid) for group in groups]
            return [
                group for group in others if group.can_ever_fit(run.devices, run.together)
            ] or groups
        return groups

    def may_backfill(self, run: QueuedRun) -> bool:
        """Whether the run ends before the reserved gang can start, so it may use its devices."""
        reservation = self.reservations.get(run.pool)
        return (
            reservation is not None
            and run.max_seconds is not None
            and self.now + run.max_seconds <= reservation.start
        )

    def start(
        self, run: QueuedRun, groups: Sequence[DeviceGroup], *, backfill: bool
    ) -> tuple[Share, ...] | None:
        """Give the run its devices now; None if no group fits it."""
        nodes = self._fit(run, groups, backfill=backfill)
        return self._take(run, nodes) if nodes else None

    def fits(self, run: QueuedRun, groups: Sequence[DeviceGroup], *, backfill: bool) -> bool:
        """Whether `start` would give the run its devices now."""
        return bool(self._fit(run, groups, backfill=backfill))

    def _fit(
        self, run: QueuedRun, groups: Sequence[DeviceGroup], *, backfill: bool
    ) -> list[NodeDevices]:
        for group in groups:
            nodes = group.fit(
                run.devices,
                run.checkpoint_nodes,
                backfill=backfill,
                together=run.together,
                stages=run.stages,
                pipeline_close=run.pipeline_close,
            )
            if nodes:
                return nodes
        return []

    def held(self) -> dict[int, tuple[Share, ...]]:
        """What the runs that this object started hold."""
        return {run: held.shares for run, held in self._held.items()}

    def release(self, run: QueuedRun) -> None:
        """Free the devices of a run that this object started."""
        held = self._held.pop(run.run)
        for node, share in zip(held.nodes, held.shares, strict=True):
            node.give_back(run.run, share.devices, held.until, held.early)
        self._changed(run.pool, held.nodes)

    def enlarge(self, run: QueuedRun, *, within: Collection[str] | None = None) -> bool:
        """Start a run that this object started again, on more devices; False if it stays.

        Only on the nodes `within`, if given. `held` has its devices then, in either case.
        """
        held = self._held.pop(run.run)
        for node, share in zip(held.nodes, held.shares, strict=True):
            node.give_back(run.run, share.devices, held.until, held.early)
        self._changed(run.pool, held.nodes)
        groups = self.candidates(run)
        if within is not None:
            groups = [part for group in groups if (part := group.on_nodes(within)).nodes]
        if self.start(run, groups, backfill=self.may_backfill(run)):
            return True
        shares = tuple(
            Share(node.node, node.take(run.run, len(share.devices), held.until, held.early))
            for node, share in zip(held.nodes, held.shares, strict=True)
        )
        self._held[run.run] = replace(held, shares=shares)
        self._changed(run.pool, held.nodes)
        return False

    def earliest(
        self, run: QueuedRun, groups: Sequence[DeviceGroup]
    ) -> tuple[float, list[NodeDevices]] | None:
        """The latest time at which the run starts, and where; None if never.

        A node is used when the run cannot last into one of its windows. Nodes that it may not use
        now count only if the others never fit it.
        """
        delay = self._delay(run)
        best = _earliest(run, groups, delay)
        if best is None and delay is not None:
            best = _earliest(run, self.candidates(run, windows=False), delay)
        if best is None or delay is None:
            return best
        # it starts when the last node is free, when windows of the others may be near
        return max(best[0], *(delay(node.node, best[0]) for node in best[1])), best[1]

    def _delay(self, run: QueuedRun) -> Delay | None:
        """From when the run may use nodes without lasting into a window; None if none has any."""
        of_nodes = self._windows.get(run.pool)
        if of_nodes is None:
            return None
        team, lasts_s, now = run.team, run.longest_s, self.now

        def after_windows(node: str, time: float) -> float:
            for window in of_nodes.get(node, ()):  # by start
                if window.excludes(team, max(now, time), lasts_s):
                    time = window.end
            return time

        return after_windows

    def reserve(
        self, run: QueuedRun, groups: Sequence[DeviceGroup], nodes: list[NodeDevices] | None = None
    ) -> bool:
        """Reserve the devices that become free first for the run; False if it never fits.

        `nodes` are those of `earliest`. While the same run is first, the choice stays.
        """
        known = self._known.get(run.pool)
        if known is not None and known.run == run.run and known.start > self.now:
            reservation = known
        else:
            if nodes is None:
                best = self.earliest(run, groups)
                if best is None:
                    return False
                nodes = best[1]
            start = min(group.may_start(run.devices, run.together) for group in groups)
            reservation = Reservation(run.run, start, nodes, run.devices // len(nodes))
        self.reservations[run.pool] = reservation
        for node in reservation.nodes:
            node.reserved = reservation.per_node
        self._changed(run.pool, reservation.nodes)
        return True

    def _supporting(self, run: QueuedRun, excluded: Mapping[str, Window]) -> list[DeviceGroup]:
        """The pool's groups, or their nodes that support what the run needs.

        `excluded` comes from `excluded`, whose objects live as long as this one.
        """
        groups = self.groups.get(run.pool, [])
        if not run.needs and not excluded:
            return groups
        key = run.pool, run.needs, id(excluded) if excluded else 0
        if key not in self._special:
            needs = set(run.needs)
            able = {node.name for node in self.nodes if needs <= node.supports} - excluded.keys()
            parts = [group.on_nodes(able) for group in groups]
            self._special[key] = [part for part in parts if part.nodes]
        return self._special[key]

    def _take(self, run: QueuedRun, nodes: list[NodeDevices]) -> tuple[Share, ...]:
        per_node = run.devices // len(nodes)
        until = self.now + run.max_seconds if run.max_seconds is not None else math.inf
        early = self.now + run.min_seconds
        shares = tuple(
            Share(node.node, node.take(run.run, per_node, until, early)) for node in nodes
        )
        self._held[run.run] = _Held(nodes, shares, until, early)
        self._changed(run.pool, nodes)
        return shares

    def _changed(self, pool: str, nodes: list[NodeDevices]) -> None:
        for group in self.groups[pool]:
            group.changed(nodes)
        for key, groups in self._special.items():
            if key[0] == pool:
                for group in groups:
                    group.changed(nodes)


def _earliest(
    run: QueuedRun, groups: Sequence[DeviceGroup], delay: Delay | None
) -> tuple[float, list[NodeDevices]] | None:
    options = [
        best
        for group in groups
        if (best := group.earliest(run.devices, run.together, delay)) is not None
    ]
    return min(options, key=lambda item: item[0]) if options else None
