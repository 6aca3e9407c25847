"""Waterfall chart of a step's time with its prediction interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.planner.charts.axes import Axis, Tick, ticks
from webui.presentation import formatting

PARTS: Final = (
    ("compute_s", gettext_noop("compute"), "mfu"),
    ("exposed_comm_s", gettext_noop("exposed communication"), "fail"),
    ("bubble_s", gettext_noop("pipeline bubble"), "time-2"),
    ("optimizer_s", gettext_noop("optimizer"), "mem-optimizer"),
    ("rollout_s", gettext_noop("rollouts"), "mem-rollouts"),
    ("other_s", gettext_noop("other"), "other-series"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One part of the step; `left` and `width` in percent of the axis."""

    name: str
    label: str
    hue: str
    seconds: float
    value: str
    share: str
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The parts of a step's time, the total and its 80% interval."""

    bars: list[Bar]
    total: Bar
    low: float
    high: float
    interval: str
    ticks: list[Tick]
    summary: str


def waterfall(answer: Mapping[str, Any]) -> Waterfall | None:
    """Draws an answer line; returns None if it has no step time."""
    step, time = formatting.number(answer.get("step_time_s")), answer.get("time") or {}
    if not step:
        return None
    low = formatting.number(answer.get("step_time_low_s")) or step
    high = formatting.number(answer.get("step_time_high_s")) or step
    parts = [
        (name, label, hue, formatting.number(time.get(name)) or 0.0) for name, label, hue in PARTS
    ]
    over = Axis(0.0, 1.02 * max(high, step, sum(value for *_, value in parts)))
    bars, at = [], 0.0
    for name, label, hue, value in parts:
        bars.append(_bar(name, _(label), hue, value, step, over, at))
        at += value
    total = _bar("step_time_s", _("step"), "time", step, step, over, 0.0)
    within = interval(low, high) if high > low else ""
    largest = sorted(
        (bar for bar in bars if bar.seconds > 0.001 * step), key=lambda bar: -bar.seconds
    )
    values = {
        "time": formatting.seconds(step),
        "interval": within,
        "parts": formatting.listed([f"{bar.label} {bar.share}" for bar in largest]),
    }
    if within:
        summary = _("%(time)s per step, 80%% interval %(interval)s: %(parts)s.") % values
    else:
        summary = _("%(time)s per step: %(parts)s.") % values
    return Waterfall(bars, total, over.at(low), over.at(high), within, ticks(over, "s", 4), summary)


def interval(low: float, high: float) -> str:
    """Returns the range of two times in seconds."""
    return _("%(low)s to %(high)s") % {
        "low": formatting.seconds(low),
        "high": formatting.seconds(high),
    }


def _bar(
    name: str, label: str, hue: str, value: float, step: float, over: Axis, start: float
) -> Bar:
    left = over.at(start)
    width = round(max(over.at(start + value) - left, 0.25 if value > 0 else 0.0), 3)
    return Bar(
        name,
        label,
        hue,
        value,
        formatting.seconds(value),
        formatting.percent(value / step),
        left,
        width,
    )
