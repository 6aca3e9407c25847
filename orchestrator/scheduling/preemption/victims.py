"""Chooses the runs that are preempted for a waiting one. Pure.

Does not depend on a database or on how a run is asked to stop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

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


def may_preempt(run: QueuedRun, holder: Holder) -> bool:
    """Whether the waiting run may take the holder's devices.

    Its priority is higher, and it is above the range of submitters or the holder's is below 0.
    """
    return run.priority > holder.priority and (
        run.priority > PREEMPTING_ABOVE or holder.priority < 0
    )


def choose(
    run: QueuedRun, nodes: Sequence[NodeView], holders: Mapping[int, Holder], now: float
) -> tuple[int, ...]:
    """The runs to preempt so that the waiting run fits; empty if none helps or none is needed.

    Lowest priority first, then the least work since the last checkpoint (device-seconds). A run
    that is not needed for the gang stays. `now` in Unix seconds.
    """
    own = [node for node in nodes if node.pool == run.pool]
    leaving = {holder.run for holder in holders.values() if holder.leaving}
    present = {slot.run for node in own for slot in node.slots if slot.run is not None}
    options = sorted(
        (
            holder
            for holder in holders.values()
            if holder.run in present
            and not holder.leaving
            and not holder.fixed
            and may_preempt(run, holder)
        ),
        key=lambda holder: (holder.priority, holder.devices * holder.unsaved_s, holder.run),
    )
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
