"""Splits the device time of one attempt into productive time and time lost by cause. Pure.

`README.md` defines each figure. Does not depend on where the times were recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.contracts.exit_classes import ExitClass

CAUSES: Final = ("startup", "trials", "restart", "hang", "node", "preemption")

# the cause of the time between the last progress and the end; other classes lose none of it
_TAIL: Final[Mapping[str, str]] = {
    ExitClass.HANG: "hang",
    ExitClass.LOST: "node",
    ExitClass.PREEMPTED: "preemption",
    ExitClass.USER_ERROR: "restart",
    ExitClass.OUT_OF_MEMORY: "restart",
    ExitClass.NUMERICS: "restart",
    ExitClass.INFRASTRUCTURE: "restart",
}


@dataclass(frozen=True)
class AttemptTimes:
    """Recorded times of an ended attempt, in Unix seconds; None where none was recorded.

    `retained` is until when its work counts: its end, or the newest checkpoint that the run keeps.
    """

    devices: int
    created: float
    ended: float
    exit_class: str
    queued: float | None = None  # when the run entered the queue
    started: float | None = None  # all ranks run
    first_work: float | None = None  # start of the first logged step
    last_work: float | None = None  # end of the last logged step
    retained: float | None = None
    # when trials of plans began and ended, before the first step; None: without trials
    trials: tuple[float, float] | None = None


@dataclass(frozen=True)
class Split:
    """Device-seconds; `allocated` = `productive` + the sum of `lost`, which has every cause."""

    allocated: float
    productive: float
    lost: Mapping[str, float]
    queued: float


def split(facts: AttemptTimes) -> Split:
    """Split the attempt's device time. Times outside the attempt are moved to its limits."""
    start, end = facts.created, max(facts.created, facts.ended)
    # the ranks of trials run too, but do no work of the run
    started = end if facts.trials else _within(facts.started, start, end, end)
    work = _within(facts.first_work, start, end, started)
    trials = 0.0
    if facts.trials is not None:
        low, high = (_within(time, start, work, work) for time in facts.trials)
        trials = max(0.0, high - low)
    last = _within(facts.last_work, work, end, work)
    retained = _within(facts.retained, work, last, work)
    seconds = dict.fromkeys(CAUSES, 0.0)
    seconds["startup"] = work - start - trials
    seconds["trials"] = trials
    seconds["restart"] = last - retained
    productive = retained - work
    tail = _TAIL.get(facts.exit_class)
    if tail is None:
        productive += end - last
    else:
        seconds[tail] += end - last
    waited = 0.0 if facts.queued is None else max(0.0, start - facts.queued)
    return Split(
        allocated=facts.devices * (end - start),
        productive=facts.devices * productive,
        lost={cause: facts.devices * value for cause, value in seconds.items()},
        queued=facts.devices * waited,
    )


def _within(value: float | None, low: float, high: float, default: float) -> float:
    return min(max(default if value is None else value, low), high)
