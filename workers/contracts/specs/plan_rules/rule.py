"""A rule about plans, and what several rules share: divisors, schedules, free devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from workers.contracts.specs.plan import (
    SCHEDULE_CODES,
    ParallelPlan,
)

# integers or integer arrays by name; see `plan_columns`
Columns = Mapping[str, Any]


# message and hint for one illegal plan
Explain = Callable[[ParallelPlan], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason why a plan is illegal.

    `broken` uses only operators that integers and NumPy arrays share: comparisons, `&`, `|` and
    arithmetic, but not `~`, which does not negate a Python bool. A rule with an `optional` column
    is skipped if the columns do not contain it.
    """

    field: str
    reason: str
    broken: Callable[[Columns], Any]
    explain: Explain
    optional: str = ""

    @property
    def name(self) -> str:
        """`field: reason`, the key of the planner's counts of rejected plans."""
        return f"{self.field}: {self.reason}"


def nearest_divisor(number: int, near: int) -> int:
    """The divisor of `number` nearest to `near`, the smaller of two equally near."""
    divisors = {
        d for i in range(1, int(number**0.5) + 1) if number % i == 0 for d in (i, number // i)
    }
    return min(divisors, key=lambda d: (abs(d - near), d))


def nearest_multiples(of: int, near: int) -> str:
    """`"8 or 16"`: the multiples of `of` around `near`."""
    below = near // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def available_to(degree: int, plan: ParallelPlan, available: int | None) -> int:
    """Devices that the plan's other degrees leave to this one.

    0 if the number of devices is not known; all of them if the other degrees do not divide it.
    """
    others = plan.world_size // degree
    return available // others if available and available % others == 0 else available or 0


def is_one_of(schedule: Any, names: Collection[str]) -> Any:
    """Whether schedule codes (an integer or an array) are those of one of the names."""
    mask = schedule == -1
    for name in names:
        mask = mask | (schedule == SCHEDULE_CODES[name])
    return mask


def micro_batches_of(c: Columns) -> Any:
    """Micro-batches per step and data parallel rank."""
    return c["global_batch"] // (c["micro_batch"] * c["dp"])
