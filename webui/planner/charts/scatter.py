"""Scatter plot of plans: step time vs memory, with the Pareto front and the device's capacity.

Positions are in percent of the plot area.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.planner.charts.axes import Tick, axis, ticks
from webui.presentation import formatting

_WIDE: Final = 8.0  # a range beyond this ratio is drawn on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Point:
    """One plan; `rank` from 0."""

    key: str
    rank: int
    x: float
    y: float
    pareto: bool
    fits: bool
    chosen: bool
    label: str
    glyph: str
    time: str
    memory: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """`front` is a polyline in a 100 x 100 box; `capacity` is the y position of a full device."""

    points: list[Point]
    front: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    capacity: float | None
    capacity_label: str
    log: bool
    summary: str


def scatter(
    plans: Sequence[Mapping[str, Any]], *, pareto: Sequence[int], chosen: str
) -> Scatter | None:
    """Draws `plans` `{key, glyph, step_time_s, total_bytes, capacity_bytes, fits}` in rank order.

    Returns None without plans.
    """
    if not plans:
        return None
    times = [float(plan["step_time_s"]) for plan in plans]
    sizes = [float(plan["total_bytes"]) for plan in plans]
    capacity = float(plans[0]["capacity_bytes"] or 0.0)
    log = max(times) > _WIDE * min(times)
    over_x = axis(times, log=log)
    over_y = axis([*sizes, capacity] if capacity else sizes, zero=True)
    on_front = set(pareto)
    points = [
        Point(
            plan["key"],
            rank,
            over_x.at(time),
            over_y.at(memory),
            rank in on_front,
            bool(plan["fits"]),
            plan["key"] == chosen,
            _("%(rank)s. %(plan)s: %(time)s per step, %(memory)s")
            % {
                "rank": rank + 1,
                "plan": plan["glyph"],
                "time": formatting.seconds(time),
                "memory": formatting.memory(memory),
            },
            plan["glyph"],
            formatting.seconds(time, 4),
            formatting.memory(memory),
        )
        for rank, (plan, time, memory) in enumerate(zip(plans, times, sizes, strict=True))
    ]
    front = sorted(
        (point for point in points if point.pareto), key=lambda point: (point.x, -point.y)
    )
    summary = ngettext(
        "%(count)s plan: %(fastest)s to %(slowest)s per step, %(smallest)s to %(largest)s; "
        "%(front)s Pareto-optimal.",
        "%(count)s plans: %(fastest)s to %(slowest)s per step, %(smallest)s to %(largest)s; "
        "%(front)s Pareto-optimal.",
        len(points),
    ) % {
        "count": f"{len(points):,}",
        "fastest": formatting.seconds(min(times)),
        "slowest": formatting.seconds(max(times)),
        "smallest": formatting.memory(min(sizes)),
        "largest": formatting.memory(max(sizes)),
        "front": len(front),
    }
    return Scatter(
        points,
        steps(front),
        ticks(over_x, "s"),
        ticks(over_y, "bytes", 4),
        over_y.at(capacity) if capacity else None,
        formatting.memory(capacity) if capacity else "",
        log,
        summary,
    )


def steps(front: Sequence[Point]) -> str:
    """Returns the front as a staircase polyline."""
    path: list[str] = []
    for before, point in zip([None, *front], front, strict=False):
        if before is not None:
            path.append(f"{point.x},{100 - before.y:.3f}")
        path.append(f"{point.x},{100 - point.y:.3f}")
    return " ".join(path)
