"""Chooses the runs that are preempted for a waiting one. Pure.

Does not depend on a database or on how a run is asked to stop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    to stop. `fixed`: it is not preempted, such as one that has just started.
    """

    run: int
    priority: int
    devices: int
    unsaved_s: float
    leaving: bool = False
    fixed: bool = False

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
) -> tuple[int, ...]:
    """The runs to preempt so that the waiting run fits; empty if none helps or none is needed.

    Lowest priority first, then the least work since the last checkpoint (device-seconds). A run
    that is not needed for the gang stays. `now` in Unix seconds.
    """
    allowed = takeable(run, nodes, holders, guarantees or {})
    own = [node for node in nodes if node.pool == run.pool]
    leaving = {holder.run for holder in holders.values() if holder.leaving}
    options = sorted((holders[each] for each in allowed), key=lambda holder: holder.cost)
    names = [holder.run for holder in options]
    if not names or _fits(run, own, leaving, now) or not _fits(run, own, leaving | {*names}, now):
        return ()
    low, high = 1, len(names)  # the smallest number of first options that is enough
    while low < high:
        middle = (low + high) // 2
        if _fits(run, own, leaving | {*names[:middle]}, now):
            high = middle
        else:
            low = middle + 1
    chosen = names[:low]
    for name in reversed(names[: low - 1]):  # the last one is needed
        without = [each for each in chosen if each != name]
        if _fits(run, own, leaving | {*without}, now):
            chosen = without
    return tuple(chosen)


def waits_for_leaving(
    run: QueuedRun, nodes: Sequence[NodeView], holders: Mapping[int, Holder], now: float
) -> tuple[int, ...]:
    """The runs that already stop, if the waiting run fits without them; else empty."""
    leaving = tuple(sorted(holder.run for holder in holders.values() if holder.leaving))
    own = [node for node in nodes if node.pool == run.pool]
    return leaving if leaving and _fits(run, own, leaving, now) else ()


def _fits(run: QueuedRun, nodes: Sequence[NodeView], freed: Collection[int], now: float) -> bool:
    """Whether the run could start if these runs held nothing."""
    views = [
        replace(
            node,
            slots=tuple(
                replace(slot, run=None, until=None, early=None) if slot.run in freed else slot
                for slot in node.slots
            ),
        )
        for node in nodes
    ]
    gangs = Gangs(views, now)
    return gangs.start(run, gangs.candidates(run), backfill=True) is not None
