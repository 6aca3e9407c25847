"""Plans as points of step time against memory, with the Pareto front and the device's capacity.
Pure.

Places are per cent of the drawing, so that it follows any width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from webui.planner.charts.axes import Tick, axis, ticks
from webui.presentation import formatting

_WIDE: Final = 8.0  # a range beyond this ratio is drawn on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Point:
    key: str
    rank: int
    x: float
    y: float
    pareto: bool
    fits: bool
    chosen: bool
    says: str
    glyph: str
    time: str
    memory: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """`front` is a polyline in a box of 100 x 100, y downwards; `capacity` where the device is
    full, or None.
    """

    points: list[Point]
    front: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    capacity: float | None
    capacity_says: str
    log: bool
    summary: str


def scatter(
    plans: Sequence[Mapping[str, Any]], *, pareto: Sequence[int], chosen: str
) -> Scatter | None:
    """`plans` are `{key, glyph, step_time_s, total_bytes, capacity_bytes, fits}` in rank order;
    None without any.
    """
    if not plans:
        return None
    times = [float(plan["step_time_s"]) for plan in plans]
    held = [float(plan["total_bytes"]) for plan in plans]
    capacity = float(plans[0]["capacity_bytes"] or 0.0)
    log = max(times) > _WIDE * min(times)
    over_x = axis(times, log=log)
    over_y = axis([*held, capacity] if capacity else held, zero=True)
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
            f"{rank + 1}. {plan['glyph']}: {formatting.seconds(time)} a step, {formatting.memory(memory)}",
            plan["glyph"],
            formatting.seconds(time, 4),
            formatting.memory(memory),
        )
        for rank, (plan, time, memory) in enumerate(zip(plans, times, held, strict=True))
    ]
    front = sorted(
        (point for point in points if point.pareto), key=lambda point: (point.x, -point.y)
    )
    fastest, lightest = min(times), min(held)
    summary = (
        f"{formatting.count(len(points), 'plan')}: {formatting.seconds(fastest)} to "
        f"{formatting.seconds(max(times))} a step, "
        f"{formatting.memory(lightest)} to {formatting.memory(max(held))}; "
        f"{formatting.count(len(front), 'plan is', 'plans are')} best in some mix of both."
    )
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
    """A staircase: between two plans of the front nothing is both faster and lighter than the
    first.
    """
    path: list[str] = []
    for before, point in zip([None, *front], front, strict=False):
        if before is not None:
            path.append(f"{point.x},{100 - before.y:.3f}")
        path.append(f"{point.x},{100 - point.y:.3f}")
    return " ".join(path)
