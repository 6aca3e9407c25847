"""A curve of points that say what they are: throughput against latency over batch sizes. Pure.

Places are per cent of the drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from webui.planner.charts.axes import Tick, axis, ticks


@dataclass(frozen=True, slots=True)
class Spot:
    x: float
    y: float
    says: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """`line` is a polyline in a box of 100 x 100, y downwards."""

    spots: list[Spot]
    line: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def curve(
    points: Sequence[tuple[float, float, str, bool]], *, x_unit: str, y_unit: str, log: bool = False
) -> Curve | None:
    """`points` are `(x, y, words, chosen)` in the order they are joined; None for fewer than two."""
    if len(points) < 2:
        return None
    over_x = axis([x for x, *_ in points], log=log)
    over_y = axis([y for _, y, *_ in points], zero=True)
    spots = [Spot(over_x.at(x), over_y.at(y), says, chosen) for x, y, says, chosen in points]
    line = " ".join(f"{spot.x},{100 - spot.y:.3f}" for spot in spots)
    return Curve(spots, line, ticks(over_x, x_unit), ticks(over_y, y_unit, 4))
