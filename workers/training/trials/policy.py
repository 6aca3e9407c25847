"""Which plan is tried next, for how many steps, and when a trial ends early. Pure.

First every plan in the order of predictions. Then those within a few percent of the fastest again,
in alternating order, so that a slow period of the machine affects all of them. Budget permitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Final

from workers.contracts.specs.autotune import LEAST_STEPS
from workers.contracts.wire.maintenance.plan_trials import TrialResult, TrialsOrder

MOST_VISITS: Final = 3  # trials of one plan
# plans whose time is at most this much above the smallest are tried again, by visits so far; the
# first limit is wide, since a burst of load may have met a whole trial
_CLOSE: Final = (0.0, 0.30, 0.08)
# a trial ends early if its fastest step is this much slower, or after more steps its lower quartile
_SLOWER: Final = 0.25
_SLOWER_QUARTILE: Final = 0.12
_QUARTILE_STEPS: Final = 6
_OVERTIME: Final = 1.25  # of the budget, after which a trial ends without a median


@dataclass(frozen=True, slots=True)
class Limits:
    """`share` of the time of the run's steps and `max_seconds` bound all trials together."""

    steps: int
    warmup_steps: int
    run_steps: int
    share: float
    max_seconds: float | None = None

    @classmethod
    def of(cls, order: TrialsOrder) -> Limits:
        """The limits of an order."""
        return cls(
            order.steps, order.warmup_steps, order.run_steps, order.max_share, order.max_seconds
        )

    def budget_s(self, step_s: float) -> float:
        """Seconds for all trials before a run whose steps take `step_s`."""
        return min(self.share * self.run_steps * step_s, self.max_seconds or float("inf"))


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one plan. `seconds` of its timed steps, `setup_s` of its last trial."""

    index: int
    predicted_s: float
    seconds: tuple[float, ...] = ()
    setup_s: float = 0.0
    visits: int = 0
    slower: bool = False
    failed: bool = False

    @property
    def step_s(self) -> float | None:
        """The median of the timed steps."""
        return median(self.seconds) if self.seconds and not self.failed else None

    def visited(self, seconds: Sequence[float], *, setup_s: float, slower: bool) -> Record:
        """The record after one more trial."""
        return replace(
            self,
            seconds=(*self.seconds, *seconds),
            setup_s=setup_s,
            visits=self.visits + 1,
            slower=slower,
        )


@dataclass(frozen=True, slots=True)
class NextTrial:
    """Try plan `index` for `steps` timed steps."""

    index: int
    steps: int


def records_of(order: TrialsOrder) -> list[Record]:
    """The plans of an order with the results of earlier attempts, by their medians."""
    results = {each.index: each for each in order.results}
    return [
        _known(Record(each.index, each.step_time_s), results.get(each.index))
        for each in sorted(order.candidates, key=lambda each: each.index)
    ]


def _known(record: Record, result: TrialResult | None) -> Record:
    if result is None:
        return record
    times = (result.step_time_s,) * result.steps if result.step_time_s is not None else ()
    return replace(
        record,
        seconds=times,
        visits=max(1, result.visits),
        slower=result.state == "slower",
        failed=result.state == "failed",
    )


def best_step_s(records: Sequence[Record]) -> float | None:
    """The smallest median so far."""
    return min((each.step_s for each in records if each.step_s is not None), default=None)


def budget_s(records: Sequence[Record], limits: Limits) -> float:
    """The budget by the fastest plan so far; by its prediction before the first measurement."""
    best = best_step_s(records)
    return limits.budget_s(min(each.predicted_s for each in records) if best is None else best)


def next_trial(records: Sequence[Record], limits: Limits, *, spent_s: float) -> NextTrial | str:
    """The next trial, or why none follows. Before any measurement there is always one."""
    usable = [each for each in records if not each.failed]
    if not usable:
        return "every plan failed"
    left_s = budget_s(records, limits) - spent_s
    setup_s = max((each.setup_s for each in records), default=0.0)
    untried = [each for each in usable if not each.visits]
    if untried:
        return _first_visit(untried, records, limits, left_s=left_s, setup_s=setup_s)
    return _repeat(usable, limits, left_s=left_s, setup_s=setup_s)


def _first_visit(
    untried: Sequence[Record],
    records: Sequence[Record],
    limits: Limits,
    *,
    left_s: float,
    setup_s: float,
) -> NextTrial | str:
    plan = untried[0]
    if best_step_s(records) is None:
        return NextTrial(plan.index, limits.steps)
    step_s = plan.predicted_s * _bias(records)
    affordable = int((left_s / len(untried) - setup_s) / step_s) - limits.warmup_steps
    steps = min(limits.steps, max(LEAST_STEPS, affordable))
    if setup_s + (limits.warmup_steps + steps) * step_s > left_s:
        return "the budget is used up"
    return NextTrial(plan.index, steps)


def _repeat(
    usable: Sequence[Record], limits: Limits, *, left_s: float, setup_s: float
) -> NextTrial | str:
    """Try close plans again, those nearest to the fastest first if not all are affordable."""
    best = best_step_s(usable)
    assert best is not None
    timed = sorted(
        (each for each in usable if each.step_s is not None), key=lambda each: each.step_s or 0.0
    )
    for visits in range(1, MOST_VISITS):
        close = [each for each in timed if (each.step_s or 0.0) <= best * (1 + _CLOSE[visits])]
        if len(close) < 2:
            return "one plan is clearly the fastest"
        waiting = [each for each in close if each.visits == visits]
        if not waiting:
            continue
        affordable = []
        for each in waiting:
            left_s -= setup_s + (limits.warmup_steps + limits.steps) * (each.step_s or best)
            if left_s >= 0:
                affordable.append(each.index)
        if not affordable:
            return "the budget is used up"
        return NextTrial(max(affordable) if visits % 2 else min(affordable), limits.steps)
    return f"the closest plans were tried {MOST_VISITS} times"


def _bias(records: Sequence[Record]) -> float:
    """Measured over predicted time: the smallest, since one bad prediction must not exclude
    plans; a trial that takes longer than the budget ends early.
    """
    return min(each.step_s / each.predicted_s for each in records if each.step_s is not None)


def early_end(
    seconds: Sequence[float], *, best_s: float | None, spent_s: float, budget_s: float
) -> str | None:
    """Why a trial with these timed steps ends now: slower or budget; None if it continues.

    `best_s` is the smallest median of other plans; without one, no trial is too slow.
    """
    enough = len(seconds) >= LEAST_STEPS
    if best_s is not None:
        if enough and min(seconds) > best_s * (1 + _SLOWER):
            return "slower"
        if len(seconds) >= _QUARTILE_STEPS:
            low = quantiles(seconds, n=4, method="inclusive")[0]
            if low > best_s * (1 + _SLOWER_QUARTILE):
                return "slower"
        if spent_s > _OVERTIME * budget_s:
            return "budget"
    return "budget" if enough and spent_s > budget_s else None


def choice(records: Sequence[Record]) -> Record | None:
    """The plan with the smallest median; None if none was measured."""
    timed = [each for each in records if each.step_s is not None]
    return min(timed, key=lambda each: (each.step_s or 0.0, each.index), default=None)
