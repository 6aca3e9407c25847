"""Chooses the runs that are preempted for a waiting one, or continue on fewer devices. Pure.

Does not depend on a database or on how a run is asked to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.scheduling.ordering.guarantees import PerTeam, held_by_team, within
from orchestrator.scheduling.placement.capacity import NodeView
from orchestrator.scheduling.placement.gangs import Gangs
from orchestrator.scheduling.placement.requests import QueuedRun

# above the range of submitters: only operators give a run such a priority
PREEMPTING_ABOVE: Final = 100


@dataclass(frozen=True, slots=True)
class Holder:
    """A run that holds devices.

    `unsaved_s` is the time since its last checkpoint, or since its start. `leaving`: it was asked
    to stop. `fixed`: it is not preempted, such as one that has just started. `shrunk` is an elastic
    run as it would be queued to continue on fewer devices, or leaves to; None if it cannot.
    """

    run: int
    priority: int
    devices: int
    unsaved_s: float
    leaving: bool = False
    fixed: bool = False
    shrunk: QueuedRun | None = None

    @property
    def cost(self) -> tuple[int, float, int]:
        """Smaller is preempted first: priority, then device-seconds of unsaved work."""
        return self.priority, self.devices * self.unsaved_s, self.run


def may_preempt(run: QueuedRun, holder: Holder) -> bool:
    """Whether the waiting run may take the holder's devices.

    Its priority is higher, and it is above the range of submitters or the holder's is below 0.
    """
    return run.priority > holder.priority and (
        run.priority > PREEMPTING_ABOVE or holder.priority < 0
    )


def may_shrink(run: QueuedRun, holder: Holder) -> bool:
    """Whether the holder gives the waiting run the devices above its smallest size.

    Work is lost by neither, so the same priority is enough.
    """
    return run.priority >= holder.priority and holder.shrunk is not None


@dataclass(frozen=True, slots=True)
class Victims:
    """Runs that stop until devices are free, and runs that continue at once on fewer devices."""

    stopped: tuple[int, ...] = ()
    shrunk: tuple[int, ...] = ()


def takeable(
    run: QueuedRun,
    nodes: Sequence[NodeView],
    holders: Mapping[int, Holder],
    guarantees: PerTeam,
) -> frozenset[int]:
    """The runs whose devices the waiting run may take, by its priority or its team's guarantee.

    Of each team those that are preempted first, while it holds more than its own guarantee: a run
    within it would be placed before this one again. A guarantee takes from other teams alone.
    """
    leaving = frozenset(holder.run for holder in holders.values() if holder.leaving)
    held = held_by_team(nodes, leaving)
    guaranteed = within(run, guarantees, held)
    team_of, devices = dict[int, str](), dict[int, int]()
    for node in nodes:
        for slot in node.slots if node.pool == run.pool else ():
            if slot.run is not None:
                team_of[slot.run] = slot.team
                devices[slot.run] = devices.get(slot.run, 0) + 1
    chosen = set()
    for holder in sorted(holders.values(), key=lambda each: each.cost):
        team = team_of.get(holder.run)
        if team is None or holder.leaving or holder.fixed:
            continue
        lent = guaranteed and team != run.team
        key = run.pool, team
        if (lent or may_preempt(run, holder)) and held[key] > guarantees.get(key, 0):
            held[key] -= devices[holder.run]
            chosen.add(holder.run)
    return frozenset(chosen)


def choose(
    run: QueuedRun,
    nodes: Sequence[NodeView],
    holders: Mapping[int, Holder],
    now: float,
    guarantees: PerTeam | None = None,
) -> Victims:
    """The runs to preempt so that the waiting run fits; none if that is useless or not needed.

    Elastic runs that continue on fewer devices come before runs that stop. Of both, lowest priority
    first, then the least work since the last checkpoint (device-seconds). A run that is not needed
    for the gang stays. `now` in Unix seconds.
    """
    run = run.smallest
    allowed = takeable(run, nodes, holders, guarantees or {})
    pool = _Pool(run, [node for node in nodes if node.pool == run.pool], holders, now)
    if pool.fits():
        return Victims()
    by_cost = sorted(holders.values(), key=lambda holder: holder.cost)
    shrinkable = _shrinkable(run, pool.nodes, by_cost, allowed, guarantees or {})
    if shrunk := _needed(shrinkable, lambda names: pool.fits(shrunk=names)):
        return Victims(shrunk=shrunk)
    stopped = _needed([each.run for each in by_cost if each.run in allowed], pool.fits)
    spared: list[int] = []
    for name in stopped:
        if holders[name].shrunk is not None:
            rest = [each for each in stopped if each not in (*spared, name)]
            if pool.fits(rest, shrunk=[*spared, name]):
                spared.append(name)
    return Victims(tuple(each for each in stopped if each not in spared), tuple(spared))


def _shrinkable(
    run: QueuedRun,
    nodes: Sequence[NodeView],
    by_cost: Sequence[Holder],
    allowed: Collection[int],
    guarantees: PerTeam,
) -> list[int]:
    """Elastic runs that continue on fewer devices for the waiting one, in this order.

    Of each team while it then still holds its own guarantee.
    """
    held = held_by_team(nodes, frozenset(each.run for each in by_cost if each.leaving))
    teams = {slot.run: slot.team for node in nodes for slot in node.slots if slot.run is not None}
    chosen = []
    for holder in by_cost:
        if holder.run not in teams or holder.leaving or holder.fixed or holder.shrunk is None:
            continue
        if not (holder.run in allowed or may_shrink(run, holder)):
            continue
        key, fewer = (run.pool, teams[holder.run]), holder.devices - holder.shrunk.least
        if held[key] - fewer >= guarantees.get(key, 0):
            held[key] -= fewer
            chosen.append(holder.run)
    return chosen


def _needed(names: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """The first of these runs that are enough, without those that are not needed; empty if none."""
    if not names or not fits(names):
        return ()
    low, high = 1, len(names)  # the smallest number of first options that is enough
    while low < high:
        middle = (low + high) // 2
        if fits(names[:middle]):
            high = middle
        else:
            low = middle + 1
    chosen = list(names[:low])
    for name in reversed(names[: low - 1]):  # the last one is needed
        without = [each for each in chosen if each != name]
        if fits(without):
            chosen = without
    return tuple(chosen)


def waits_for_leaving(
    run: QueuedRun, nodes: Sequence[NodeView], holders: Mapping[int, Holder], now: float
) -> tuple[int, ...]:
    """The runs that already stop, if the waiting run fits without them; else empty."""
    leaving = tuple(sorted(holder.run for holder in holders.values() if holder.leaving))
    own = [node for node in nodes if node.pool == run.pool]
    return leaving if leaving and _Pool(run.smallest, own, holders, now).fits() else ()


class _Pool:
    """Whether a waiting run could start on the nodes of its pool after others have stopped."""

    def __init__(
        self,
        run: QueuedRun,
        nodes: Sequence[NodeView],
        holders: Mapping[int, Holder],
        now: float,
    ) -> None:
        self.run, self.nodes, self._holders, self._now = run, nodes, holders, now
        self._leaving = {holder.run for holder in holders.values() if holder.leaving}
        self._retained = [
            holder.shrunk
            for holder in holders.values()
            if holder.leaving and holder.shrunk is not None and holder.shrunk.pool == run.pool
        ]

    def fits(self, stopped: Collection[int] = (), *, shrunk: Collection[int] = ()) -> bool:
        """Whether it fits if the runs that leave, and these, hold nothing.

        The `shrunk` ones, and those that leave to shrink, get their smallest size first.
        """
        freed = self._leaving | {*stopped, *shrunk}
        views = [
            replace(
                node,
                slots=tuple(
                    replace(slot, run=None, until=None, early=None) if slot.run in freed else slot
                    for slot in node.slots
                ),
            )
            for node in self.nodes
        ]
        gangs = Gangs(views, self._now)
        retained = [*self._retained, *(self._holders[name].shrunk for name in shrunk)]
        for each in sorted((run for run in retained if run is not None), key=lambda run: run.run):
            least = each.smallest
            if gangs.start(least, gangs.candidates(least), backfill=True) is None:
                return False
        return gangs.start(self.run, gangs.candidates(self.run), backfill=True) is not None
