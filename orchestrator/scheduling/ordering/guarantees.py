"""Guaranteed devices of teams: who comes first, and whose devices they may take back. Pure.

A team lends what it does not use: any run may hold it. A run within its team's guarantee comes
before all others and preempts runs of teams that hold more than theirs (Kueue: borrowing queues
first, lowest priority first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.scheduling.placement.capacity import NodeView
from orchestrator.scheduling.placement.requests import QueuedRun

# (pool, team) → devices
PerTeam = Mapping[tuple[str, str], int]


def held_by_team(
    nodes: Iterable[NodeView], without: frozenset[int] = frozenset()
) -> dict[tuple[str, str], int]:
    """Devices that the runs of each team hold in each pool; `without` these runs."""
    held: dict[tuple[str, str], int] = {}
    for node in nodes:
        for slot in node.slots:
            if slot.run is not None and slot.run not in without:
                key = node.pool, slot.team
                held[key] = held.get(key, 0) + 1
    return held


def within(run: QueuedRun, guarantees: PerTeam, held: PerTeam) -> bool:
    """Whether the run, at its smallest size, and what its team holds stay within the guarantee."""
    key = run.pool, run.team
    return held.get(key, 0) + run.least <= guarantees.get(key, 0)


def guaranteed_first(
    ordered: Sequence[QueuedRun],
    guarantees: PerTeam,
    held: PerTeam,
    now: float,
    could_start: Callable[[QueuedRun], bool] = lambda _run: True,
) -> list[QueuedRun]:
    """The runs that fit into their teams' guarantees, then the others, each in this order."""
    first, others = split_by_guarantee(ordered, guarantees, held, now, could_start)
    return first + others


def split_by_guarantee(
    ordered: Sequence[QueuedRun],
    guarantees: PerTeam,
    held: PerTeam,
    now: float,
    could_start: Callable[[QueuedRun], bool] = lambda _run: True,
) -> tuple[list[QueuedRun], list[QueuedRun]]:
    """The runs that fit into their teams' guarantees, and the others, each in this order.

    A run that could not start although devices are free, by `could_start`, uses up no guarantee.
    It is called once per run that fits; those for which it is true come first.
    """
    if not guarantees:
        return [], list(ordered)
    claimed, first, others = dict(held), [], []
    for run in ordered:
        ready = run.not_before is None or run.not_before <= now
        if ready and not run.server and within(run, guarantees, claimed) and could_start(run):
            key = run.pool, run.team
            claimed[key] = claimed.get(key, 0) + run.least
            first.append(run)
        else:
            others.append(run)
    return first, others
