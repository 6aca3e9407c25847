"""A curve of labeled points, such as throughput vs latency over batch sizes.

Positions are in percent of the plot area.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from webui.planner.charts.axes import Tick, axis, ticks


@dataclass(frozen=True, slots=True)
class Spot:
    """One point of the curve."""

    x: float
    y: float
    label: str
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
    """Joins `points` `(x, y, label, chosen)` in order; None for fewer than two."""
    if len(points) < 2:
        return None
    over_x = axis([x for x, *_ in points], log=log)
    over_y = axis([y for _, y, *_ in points], zero=True)
    spots = [Spot(over_x.at(x), over_y.at(y), label, chosen) for x, y, label, chosen in points]
    line = " ".join(f"{spot.x},{100 - spot.y:.3f}" for spot in spots)
    return Curve(spots, line, ticks(over_x, x_unit), ticks(over_y, y_unit, 4))
