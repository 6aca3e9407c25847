"""Lays out many curves as a heat map: one row per rank, layer or expert. Pure functions.

Cells of one color share one SVG path, so thousands of cells stay light. A bucket of steps shows its
largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any, Final, Literal

from django.utils.translation import gettext as _

from webui.charts.level_blocks import level_blocks
from webui.planner.charts.axes import Tick
from webui.presentation import formatting

COLUMNS: Final = 96
ROWS: Final = 64
LEVELS: Final = 8
NON_FINITE: Final = "odd"  # the level of non-finite values
_NAMED: Final = 24  # up to this many rows, each is named
_EVEN: Final = 4  # levels on each side of an even load
_TICKS: Final = 6
_FEW: Final = 40  # with fewer cells, the largest one sets the scale


@dataclass(frozen=True, slots=True)
class Strip:
    """One row: its name, its place, and its curve; `x` are steps or other column numbers."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    place: str = ""


@dataclass(frozen=True, slots=True)
class EventMark:
    """An event at a step; `kind` as of `EventMessage`."""

    step: float
    text: str
    kind: str = "event"


@dataclass(frozen=True, slots=True)
class Heat:
    """`paths` are `(level, d)` in a box of `columns` x `rows`; `legend` is `(level, label)` from
    low to high.

    `cells` is what the pointer reads: `{names, edges, text: [row][column]}`; text is None where
    there is no value.
    """

    names: list[tuple[str, str]]
    columns: int
    paths: list[tuple[str, str]]
    legend: list[tuple[str, str]]
    ticks: list[Tick]
    summary: str
    cells: dict[str, Any]
    table: list[tuple[str, str, str, str]]
    left_out: int = 0
    marks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.names)

    @property
    def named(self) -> bool:
        """Whether each row shows its name."""
        return self.rows <= _NAMED


Format = Callable[[float], str]
Scale = Literal["rising", "orders", "even"]


def heat(
    strips: Sequence[Strip],
    *,
    format: Format,
    summary: str,
    scale: Scale = "rising",
    across: str = "step",
    marks: Sequence[EventMark] = (),
    left_out: int = 0,
    columns: int = COLUMNS,
) -> Heat | None:
    """Lay out the strips; None if none has a point.

    `scale`: "rising" from zero; "orders" of magnitude; "even" for shares where 1 is even.
    """
    strips = [strip for strip in strips if len(strip.x)]
    if not strips:
        return None
    places = sorted({float(place) for strip in strips for place in strip.x})
    edges = _edges(places, columns)
    grid = [_row(strip, edges, _mean if scale == "even" else _worst) for strip in strips]
    finite = [value for row in grid for value in row if value is not None and math.isfinite(value)]
    level, legend = _even(format) if scale == "even" else _LEVELS[scale](finite, format)
    paths: dict[str, list[str]] = {}
    for index, row in enumerate(grid):
        for left, width, name in level_blocks(
            [None if value is None else level(value) for value in row]
        ):
            paths.setdefault(name, []).append(f"M{left} {index}h{width}v1h-{width}z")
    used = set(paths)
    if NON_FINITE in used:
        legend = [*legend, (NON_FINITE, _("not finite"))]
    return Heat(
        names=[(strip.name, strip.place) for strip in strips],
        columns=len(edges),
        paths=[(name, "".join(parts)) for name, parts in sorted(paths.items())],
        legend=legend,
        ticks=_ticks(edges),
        summary=summary,
        cells={
            "across": across,
            "of": _("mean") if scale == "even" else _("max"),
            "names": [
                " · ".join(part for part in (strip.name, strip.place) if part) for strip in strips
            ],
            "edges": [[_plain(low), _plain(high)] for low, high in edges],
            "text": [
                [None if value is None else _format(value, format) for value in row] for row in grid
            ],
        },
        table=[_line(strip, format) for strip in strips],
        left_out=left_out,
        marks=_marks(marks, edges),
    )


def _edges(places: Sequence[float], most: int) -> list[tuple[float, float]]:
    """First and last place of each column; buckets hold equal numbers of places."""
    if len(places) <= most:
        return [(place, place) for place in places]
    size = -(-len(places) // most)
    return [
        (some[0], some[-1])
        for start in range(0, len(places), size)
        if (some := places[start : start + size])
    ]


def _row(
    strip: Strip, edges: Sequence[tuple[float, float]], of: Callable[[list[float]], float]
) -> list[float | None]:
    """One value per column; a non-finite value takes precedence."""
    values: list[list[float]] = [[] for _ in edges]
    column = 0
    for place, value in zip(strip.x, strip.y, strict=True):
        while column + 1 < len(edges) and place >= edges[column + 1][0]:
            column += 1
        values[column].append(float(value))
    return [
        next((value for value in some if not math.isfinite(value)), None) or of(some)
        if some
        else None
        for some in values
    ]


def _worst(some: list[float]) -> float:
    return max(some)


def _mean(some: list[float]) -> float:
    return fmean(some)


def _rising(
    finite: Sequence[float], format: Format
) -> tuple[Callable[[float], str], list[tuple[str, str]]]:
    """From zero to the 99th percentile, so one outlier does not flatten all other cells."""
    top = max(finite, default=0.0)
    if len(finite) >= _FEW:
        top = min(top, quantiles(finite, n=100)[98] or top)

    def level(value: float) -> str:
        if not math.isfinite(value):
            return NON_FINITE
        return str(min(LEVELS, math.ceil(LEVELS * value / top))) if value > 0 and top > 0 else "0"

    if top <= 0:
        return level, [("0", format(0.0))]
    shown = [("0", "0"), *((str(step), format(top * step / LEVELS)) for step in range(1, LEVELS))]
    above = _("%(value)s and more") % {"value": format(top)} if max(finite) > top else format(top)
    return level, [*shown, (str(LEVELS), above)]


def _orders(
    finite: Sequence[float], format: Format
) -> tuple[Callable[[float], str], list[tuple[str, str]]]:
    """Even steps of the logarithm from the 1st to the 99th percentile of positive values."""
    above = [value for value in finite if value > 0]
    bounds = quantiles(above, n=100) if len(above) >= _FEW else []
    low, high = (
        (bounds[0], bounds[98]) if bounds else (min(above, default=1.0), max(above, default=1.0))
    )
    ratio = max(high / low, 1 + 1e-9)

    def level(value: float) -> str:
        if not math.isfinite(value):
            return NON_FINITE
        if value <= 0:
            return "0"
        return str(min(LEVELS, max(1, 1 + math.floor(LEVELS * math.log(value / low, ratio)))))

    legend = [("0", "0")] if any(value <= 0 for value in finite) else []
    for step in range(LEVELS):
        legend.append((str(step + 1), format(low * ratio ** (step / (LEVELS - 1)))))
    return level, legend


_LEVELS: Final = {"rising": _rising, "orders": _orders}


def _even(format: Format) -> tuple[Callable[[float], str], list[tuple[str, str]]]:
    """Steps of sqrt(2): a quarter of the even share to four times it, cool below, warm above."""

    def level(value: float) -> str:
        if not math.isfinite(value):
            return NON_FINITE
        step = round(2 * math.log2(value)) if value > 0 else -_EVEN
        step = max(-_EVEN, min(_EVEN, step))
        return f"cool-{-step}" if step < 0 else f"warm-{step}" if step else "even"

    low = [(f"cool-{step}", format(2 ** (-step / 2))) for step in range(_EVEN, 0, -1)]
    high = [(f"warm-{step}", format(2 ** (step / 2))) for step in range(1, _EVEN + 1)]
    return level, [*low, ("even", format(1.0)), *high]


def _ticks(edges: Sequence[tuple[float, float]]) -> list[Tick]:
    """Round steps at their columns; columns hold equal numbers of points, not of steps."""
    first, last = edges[0][0], edges[-1][1]
    rough = max(1.0, (last - first) / _TICKS)
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * ten for nice in (1, 2, 5, 10) if nice * ten >= rough)
    ticks = []
    for count in range(math.ceil(first / step), math.floor(last / step) + 1):
        column = next(index for index, (low, high) in enumerate(edges) if high >= count * step)
        ticks.append(Tick(round(100 * (column + 0.5) / len(edges), 2), f"{round(count * step):,}"))
    return ticks


def _marks(
    marks: Sequence[EventMark], edges: Sequence[tuple[float, float]]
) -> list[dict[str, Any]]:
    """Marks within the steps shown; several in one column are merged."""
    by_column: dict[int, list[EventMark]] = {}
    for mark in marks:
        if edges[0][0] <= mark.step <= edges[-1][1]:
            column = next(index for index, (low, high) in enumerate(edges) if high >= mark.step)
            by_column.setdefault(column, []).append(mark)
    return [
        {
            "at": round(100 * (column + 0.5) / len(edges), 2),
            "kind": "bad" if any(mark.kind == "bad" for mark in some) else some[0].kind,
            "text": "; ".join(mark.text for mark in some[:3])
            + (_(" and %(count)s more") % {"count": len(some) - 3} if len(some) > 3 else ""),
        }
        for column, some in sorted(by_column.items())
    ]


def _line(strip: Strip, format: Format) -> tuple[str, str, str, str]:
    """Name, place, newest and largest value as text."""
    finite = [value for value in strip.y if math.isfinite(value)]
    return (
        strip.name,
        strip.place,
        _format(strip.y[-1], format),
        _format(max(finite), format) if finite else formatting.DASH,
    )


def _format(value: float, format: Format) -> str:
    if math.isfinite(value):
        return format(value)
    return _("not a number") if math.isnan(value) else _("infinite")


def _plain(place: float) -> int | float:
    return int(place) if float(place).is_integer() else place
