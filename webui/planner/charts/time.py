"""A step's time as a waterfall: what it is made of, one after the other, and the interval it ends
in. Pure.
"""

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
    """`left` and `width` in per cent of the axis."""

    name: str
    word: str
    hue: str
    seconds: float
    says: str
    share: str
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class Waterfall:
    bars: list[Bar]
    total: Bar
    low: float
    high: float
    interval: str
    ticks: list[Tick]
    summary: str


def waterfall(answer: Mapping[str, Any]) -> Waterfall | None:
    """From an answer line; None where it has no time."""
    step, time = formatting.number(answer.get("step_time_s")), answer.get("time") or {}
    if not step:
        return None
    low = formatting.number(answer.get("step_time_low_s")) or step
    high = formatting.number(answer.get("step_time_high_s")) or step
    held = [
        (name, word, hue, formatting.number(time.get(name)) or 0.0) for name, word, hue in PARTS
    ]
    over = Axis(0.0, 1.02 * max(high, step, sum(value for *_, value in held)))
    bars, at = [], 0.0
    for name, word, hue, value in held:
        bars.append(_bar(name, word, hue, value, step, over, at))
        at += value
    total = _bar("step_time_s", "step", "time", step, step, over, 0.0)
    interval = f"{formatting.seconds(low)} to {formatting.seconds(high)}" if high > low else ""
    largest = sorted(
        (bar for bar in bars if bar.seconds > 0.001 * step), key=lambda bar: -bar.seconds
    )
    summary = (
        f"{formatting.seconds(step)} a step"
        + (f", 80% likely within {interval}" if interval else "")
        + ": "
    )
    summary += formatting.listed([f"{bar.word} {bar.share}" for bar in largest]) + "."
    return Waterfall(
        bars, total, over.at(low), over.at(high), interval, ticks(over, "s", 4), summary
    )


def _bar(
    name: str, word: str, hue: str, value: float, step: float, over: Axis, start: float
) -> Bar:
    left = over.at(start)
    width = round(max(over.at(start + value) - left, 0.25 if value > 0 else 0.0), 3)
    return Bar(
        name,
        word,
        hue,
        value,
        formatting.seconds(value),
        formatting.percent(value / step),
        left,
        width,
    )
