"""Charts of a simulation: waiting times by share of runs, and utilization over time, per policy.

Positions are in percent of the plot area. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _

from webui.planner.charts.axes import Axis, Tick, ticks
from webui.presentation import formatting

HUES: Final = {
    "fifo": "time-2",
    "shortest_first": "other-series",
    "fair_share": "throughput",
    "orrery": "loss",
    "orrery_elastic": "mfu",
}
_SHORTEST_S: Final = 1.0  # shorter waits are drawn here


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """One policy; `points` is a polyline in a 100 x 100 box."""

    name: str
    hue: str
    points: str


@dataclass(frozen=True, slots=True)
class LineChart:
    """A chart with one line per policy; `summary` says it as text."""

    id: str
    title: str
    x_title: str
    lines: list[PolicyLine]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    summary: str


def charts(result: Mapping[str, Any]) -> list[LineChart]:
    """The charts of `compare_with_charts`."""
    data = result["charts"]
    return [_waiting(data["waits_s"]), _utilization(data["hours"], data["utilization"])]


def _waiting(waits: Mapping[str, Sequence[float]]) -> LineChart:
    longest = max((max(values) for values in waits.values()), default=0.0)
    over_y = Axis(_SHORTEST_S, max(60.0, longest) * 1.1, log=True)
    lines = [
        PolicyLine(
            name,
            HUES.get(name, "event"),
            " ".join(
                f"{percent},{100 - over_y.at(max(_SHORTEST_S, value)):.2f}"
                for percent, value in enumerate(values)
            ),
        )
        for name, values in waits.items()
    ]
    shares = [Tick(at, f"{at} %") for at in (0, 25, 50, 75, 100)]
    half = ", ".join(
        _("%(policy)s: 95%% of runs within %(wait)s")
        % {"policy": name, "wait": formatting.seconds(values[95])}
        for name, values in waits.items()
    )
    title = _("Waiting time, shortest to longest")
    return LineChart("waiting", title, _("runs"), lines, shares, ticks(over_y, "s"), half)


def _utilization(hours: Sequence[float], used: Mapping[str, Sequence[float]]) -> LineChart:
    length = hours[-1] if hours else 1.0
    over_x, over_y = Axis(0.0, length), Axis(0.0, 1.0)
    lines = [
        PolicyLine(
            name,
            HUES.get(name, "event"),
            " ".join(
                f"{over_x.at(hour):.2f},{100 - over_y.at(share):.2f}"
                for hour, share in zip(hours, shares, strict=True)
            ),
        )
        for name, shares in used.items()
    ]
    days = length / 24
    step = next((step for step in (0.25, 0.5, 1, 2, 5, 10, 20, 50) if days / step <= 6), 100)
    marks = [index * step for index in range(int(days / step) + 1)]
    x_ticks = [Tick(over_x.at(24 * day), _("day %(day)s") % {"day": f"{day:g}"}) for day in marks]
    y_ticks = [Tick(at, f"{at} %") for at in (0, 25, 50, 75, 100)]
    words = ", ".join(
        f"{name}: {100 * sum(shares) / max(1, len(shares)):.1f} %" for name, shares in used.items()
    )
    title = _("Devices in use")
    return LineChart("utilization", title, _("time"), lines, x_ticks, y_ticks, words)
