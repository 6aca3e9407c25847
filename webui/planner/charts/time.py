"""Waterfall chart of a step's time with its prediction interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from webui.planner.charts.axes import Axis, Tick, ticks
from webui.presentation import formatting

PARTS: Final = (
    ("compute_s", "compute", "mfu"),
    ("exposed_comm_s", "exposed communication", "fail"),
    ("bubble_s", "pipeline bubble", "time-2"),
    ("optimizer_s", "optimizer", "mem-optimizer"),
    ("other_s", "other", "other-series"),
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
        bars.append(_bar(name, label, hue, value, step, over, at))
        at += value
    total = _bar("step_time_s", "step", "time", step, step, over, 0.0)
    interval = f"{formatting.seconds(low)} to {formatting.seconds(high)}" if high > low else ""
    largest = sorted(
        (bar for bar in bars if bar.seconds > 0.001 * step), key=lambda bar: -bar.seconds
    )
    summary = (
        f"{formatting.seconds(step)} per step"
        + (f", 80% interval {interval}" if interval else "")
        + ": "
    )
    summary += formatting.listed([f"{bar.label} {bar.share}" for bar in largest]) + "."
    return Waterfall(
        bars, total, over.at(low), over.at(high), interval, ticks(over, "s", 4), summary
    )


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
