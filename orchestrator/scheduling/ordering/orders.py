"""The policies by name: in which order waiting runs are tried, and what a blocked run does. Pure.

The scheduler uses `orrery`; the simulator compares all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.placement.requests import QueuedRun

# `orrery`: a run counts as submitted later by this many times its predicted duration, …
LATER_PER_SECOND: Final = 10.0
# … at most by this: so a run is overtaken only by runs submitted within this time after it
LATER_AT_MOST_S: Final = 12 * 3600.0
# a team that has used far more than the others counts as submitted later by up to this
FAIR_SHARE_S: Final = 2 * 3600.0
# a run that has waited this long gains one priority step, and again after the same time
PRIORITY_AGE_S: Final = 24 * 3600.0

Rank = tuple[float, float, float]


@dataclass(frozen=True)
class Order:
    """One policy.

    `base` orders runs of the same owner, smaller first. `rank` gives two numbers that go before it
    and seconds that are added to it, by the owner's usage; `by_owner` is false if it is constant.
    """

    name: str
    base: Callable[[QueuedRun], float]
    head_blocks: bool = False  # no run starts before one that is before it
    reserves: bool = False  # the first run that does not fit reserves devices
    by_priority: bool = True
    by_owner: bool = False
    true_durations: bool = False  # for comparison only: the true durations
    elastic: bool = False  # in simulations: runs of 2 and more devices may shrink to a quarter
    rank: Callable[[DecayedUsage, str, str, float], Rank] = lambda usage, team, person, now: (
        0,
        0,
        0,
    )


def _submitted(run: QueuedRun) -> float:
    return run.queued_at


def _duration(run: QueuedRun) -> float:
    return run.expected_s if run.expected_s is not None else LATER_AT_MOST_S


def _later_by_duration(run: QueuedRun) -> float:
    if run.expected_s is None:
        return run.queued_at + LATER_AT_MOST_S
    return run.queued_at + min(LATER_PER_SECOND * run.expected_s, LATER_AT_MOST_S)


def _level_fairness(usage: DecayedUsage, team: str, person: str, now: float) -> Rank:
    """The team with the least weighted usage first, then its person with the least.

    Slurm's fair tree compares siblings in the same way (Slurm docs, Fair Tree Fairshare Algorithm).
    """
    return usage.of_team(team, now), usage.of_person(team, person, now), 0.0


def _excess(usage: DecayedUsage, team: str, person: str, now: float) -> Rank:
    return 0.0, 0.0, FAIR_SHARE_S * usage.excess(team, now)


ORDERS: Final[Mapping[str, Order]] = {
    order.name: order
    for order in (
        Order("fifo", _submitted, head_blocks=True, by_priority=False),
        Order("shortest_first", _duration, by_priority=False, true_durations=True),
        Order("fair_share", _submitted, reserves=True, by_owner=True, rank=_level_fairness),
        Order("orrery", _later_by_duration, reserves=True, by_owner=True, rank=_excess),
        Order(
            "orrery_elastic",
            _later_by_duration,
            reserves=True,
            by_owner=True,
            rank=_excess,
            elastic=True,
        ),
    )
}


def effective_priority(priority: int, queued_at: float, now: float) -> int:
    """The priority plus one step per `PRIORITY_AGE_S` of waiting."""
    return priority + int(max(0.0, now - queued_at) // PRIORITY_AGE_S)
