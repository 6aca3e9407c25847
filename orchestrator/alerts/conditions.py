"""Decides whether a rule's condition holds for a run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

KINDS: Final = ("threshold", "nan", "no_progress", "slow", "idle", "cost", "state")
WATCHED: Final = ("loss", "val_loss", "grad_norm")  # of `nan` without a metric
UTILIZATION: Final = "device/utilization"
SPEED: Final = "tokens_per_s"


@dataclass(frozen=True, slots=True)
class Condition:
    """A rule without its owner; `threshold` is in the unit of the kind."""

    kind: str
    metric: str = ""
    operator: str = ">"
    threshold: float = 0.0
    state: str = ""
    kinds: tuple[str, ...] = ()  # of runs; empty: all


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules read of a run; times are seconds before now, None if unknown."""

    state: str
    kind: str
    latest: Mapping[str, float] = field(default_factory=dict)
    prediction: Mapping[str, Any] = field(default_factory=dict)
    silent_s: float | None = None
    device_hours: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """The condition holds: a sentence, and the value it is about."""

    message: str
    value: float | None = None


def hit_of(condition: Condition, facts: Facts) -> Hit | None:
    """What is wrong with the run by this condition; None if it does not hold."""
    if condition.kinds and facts.kind not in condition.kinds:
        return None
    if condition.kind == "state":
        reason = f": {facts.reason}" if facts.reason else ""
        is_reached = facts.state == condition.state
        return Hit(f"The run {_ending(facts.state)}{reason}"[:300]) if is_reached else None
    if facts.state != "running":
        return None
    return _CHECKS[condition.kind](condition, facts)


def _ending(state: str) -> str:
    return "was cancelled" if state == "cancelled" else state


def _threshold(condition: Condition, facts: Facts) -> Hit | None:
    value = facts.latest.get(condition.metric)
    if value is None or not math.isfinite(value):
        return None
    is_above = condition.operator == ">"
    if not (value > condition.threshold if is_above else value < condition.threshold):
        return None
    side = "above" if is_above else "below"
    return Hit(f"{condition.metric} is {value:.4g}, {side} {condition.threshold:.4g}", value)


def _nan(condition: Condition, facts: Facts) -> Hit | None:
    names = (condition.metric,) if condition.metric else WATCHED
    for name in names:
        value = facts.latest.get(name)
        if value is not None and not math.isfinite(value):
            return Hit(f"{name} is not a finite number")
    return None


def _no_progress(condition: Condition, facts: Facts) -> Hit | None:
    if facts.silent_s is None or facts.silent_s <= condition.threshold:
        return None
    return Hit(f"nothing logged for {_span(facts.silent_s)}", facts.silent_s)


def _slow(condition: Condition, facts: Facts) -> Hit | None:
    predicted, value = facts.prediction.get(SPEED), facts.latest.get(SPEED)
    if not isinstance(predicted, int | float) or not predicted or value is None:
        return None
    share = value / predicted
    if not share < condition.threshold:
        return None
    return Hit(f"{value:,.0f} tokens/s, {share:.0%} of the prediction", share)


def _idle(condition: Condition, facts: Facts) -> Hit | None:
    value = facts.latest.get(UTILIZATION)
    if value is None or not value < condition.threshold:
        return None
    return Hit(f"devices are {value:.0%} utilized", value)


def _cost(condition: Condition, facts: Facts) -> Hit | None:
    if not facts.device_hours > condition.threshold:
        return None
    return Hit(
        f"{facts.device_hours:,.1f} device-hours used, more than {condition.threshold:,.4g}",
        facts.device_hours,
    )


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_CHECKS: Final = {
    "threshold": _threshold,
    "nan": _nan,
    "no_progress": _no_progress,
    "slow": _slow,
    "idle": _idle,
    "cost": _cost,
}
