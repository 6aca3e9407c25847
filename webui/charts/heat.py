"""Many curves as a heat map, one row a rank, layer or expert; colour is the value: what differs is
seen at once. Pure.

Cells of one colour are one path, so that thousands of them stay light; a bucket of steps shows its
largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any, Final, Literal

from webui.planner.charts.axes import Tick
from webui.presentation import formatting

COLUMNS: Final = 96
ROWS: Final = 64
LEVELS: Final = 8
ODD: Final = "odd"  # the level of what is not a number
_NAMED: Final = 24  # rows up to which each is named
_EVEN: Final = 4  # levels on each side of an even load
_TICKS: Final = 6
_FEW: Final = 40  # cells below which the largest one makes the scale


@dataclass(frozen=True, slots=True)
class Strip:
    """One row: its name, where it is, and its curve; `x` are steps, or columns of any other count."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    place: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, in words; `kind` as of `moments`."""

    step: float
    text: str
    kind: str = "event"


@dataclass(frozen=True, slots=True)
class Heat:
    """`paths` are `(level, d)` in a box of `columns` x `rows`; `legend` is `(level, words)` from
    low to high.

    `cells` is what a pointer reads: `{names, from, to, says: [row][column]}`, None where nothing
    was told.
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
        return len(self.names)

    @property
    def named(self) -> bool:
        return self.rows <= _NAMED


Say = Callable[[float], str]
Scale = Literal["rising", "orders", "even"]


def heat(
    strips: Sequence[Strip],
    *,
    says: Say,
    summary: str,
    scale: Scale = "rising",
    across: str = "step",
    marks: Sequence[Mark] = (),
    left_out: int = 0,
    columns: int = COLUMNS,
) -> Heat | None:
    """None where no strip has a point. `scale`: "rising" from nothing; "orders" of magnitude;
    "even", shares of which 1
    is even, coloured to both sides of it."""
    strips = [strip for strip in strips if len(strip.x)]
    if not strips:
        return None
    places = sorted({float(place) for strip in strips for place in strip.x})
    edges = _edges(places, columns)
    grid = [_row(strip, edges, _mean if scale == "even" else _worst) for strip in strips]
    finite = [value for row in grid for value in row if value is not None and math.isfinite(value)]
    level, legend = _even(says) if scale == "even" else _LEVELS[scale](finite, says)
    paths: dict[str, list[str]] = {}
    for index, row in enumerate(grid):
        for left, width, name in _runs([None if value is None else level(value) for value in row]):
            paths.setdefault(name, []).append(f"M{left} {index}h{width}v1h-{width}z")
    used = set(paths)
    if ODD in used:
        legend = [*legend, (ODD, "not finite")]
    return Heat(
        names=[(strip.name, strip.place) for strip in strips],
        columns=len(edges),
        paths=[(name, "".join(parts)) for name, parts in sorted(paths.items())],
        legend=legend,
        ticks=_ticks(edges),
        summary=summary,
        cells={
            "across": across,
            "of": "mean" if scale == "even" else "at most",
            "names": [
                " · ".join(part for part in (strip.name, strip.place) if part) for strip in strips
            ],
            "edges": [[_plain(low), _plain(high)] for low, high in edges],
            "says": [
                [None if value is None else _told(value, says) for value in row] for row in grid
            ],
        },
        table=[_line(strip, says) for strip in strips],
        left_out=left_out,
        marks=_marks(marks, edges),
    )


def _edges(places: Sequence[float], most: int) -> list[tuple[float, float]]:
    """First and last place of each column; buckets hold equal numbers of the places there are."""
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
    """One value for each column of the row's own; what is not a number wins, so that it is never
    lost.
    """
    held: list[list[float]] = [[] for _ in edges]
    column = 0
    for place, value in zip(strip.x, strip.y, strict=True):
        while column + 1 < len(edges) and place >= edges[column + 1][0]:
            column += 1
        held[column].append(float(value))
    return [
        next((value for value in some if not math.isfinite(value)), None) or of(some)
        if some
        else None
        for some in held
    ]


def _worst(some: list[float]) -> float:
    return max(some)


def _mean(some: list[float]) -> float:
    return fmean(some)


def _rising(
    finite: Sequence[float], says: Say
) -> tuple[Callable[[float], str], list[tuple[str, str]]]:
    """From nothing to the 99th percentile: one wild cell must not make all others look alike."""
    top = max(finite, default=0.0)
    if len(finite) >= _FEW:
        top = min(top, quantiles(finite, n=100)[98] or top)

    def level(value: float) -> str:
        if not math.isfinite(value):
            return ODD
        return str(min(LEVELS, math.ceil(LEVELS * value / top))) if value > 0 and top > 0 else "0"

    if top <= 0:
        return level, [("0", says(0.0))]
    shown = [("0", "0"), *((str(step), says(top * step / LEVELS)) for step in range(1, LEVELS))]
    above = f"{says(top)} and more" if max(finite) > top else says(top)
    return level, [*shown, (str(LEVELS), above)]


def _orders(
    finite: Sequence[float], says: Say
) -> tuple[Callable[[float], str], list[tuple[str, str]]]:
    """Even steps of the logarithm from the 1st percentile of what is above nothing to the 99th."""
    above = [value for value in finite if value > 0]
    cuts = quantiles(above, n=100) if len(above) >= _FEW else []
    low, high = (cuts[0], cuts[98]) if cuts else (min(above, default=1.0), max(above, default=1.0))
    ratio = max(high / low, 1 + 1e-9)

    def level(value: float) -> str:
        if not math.isfinite(value):
            return ODD
        if value <= 0:
            return "0"
        return str(min(LEVELS, max(1, 1 + math.floor(LEVELS * math.log(value / low, ratio)))))

    legend = [("0", "0")] if any(value <= 0 for value in finite) else []
    for step in range(LEVELS):
        legend.append((str(step + 1), says(low * ratio ** (step / (LEVELS - 1)))))
    return level, legend


_LEVELS: Final = {"rising": _rising, "orders": _orders}


def _even(says: Say) -> tuple[Callable[[float], str], list[tuple[str, str]]]:
    """By halves of a doubling: a quarter of the even share to four times it, cool below and warm
    above.
    """

    def level(value: float) -> str:
        if not math.isfinite(value):
            return ODD
        step = round(2 * math.log2(value)) if value > 0 else -_EVEN
        step = max(-_EVEN, min(_EVEN, step))
        return f"cool-{-step}" if step < 0 else f"warm-{step}" if step else "even"

    low = [(f"cool-{step}", says(2 ** (-step / 2))) for step in range(_EVEN, 0, -1)]
    high = [(f"warm-{step}", says(2 ** (step / 2))) for step in range(1, _EVEN + 1)]
    return level, [*low, ("even", says(1.0)), *high]


def _runs(levels: Sequence[str | None]) -> list[tuple[int, int, str]]:
    """Neighbours of one level as one block: `(left, width, level)`."""
    found: list[tuple[int, int, str]] = []
    for at, name in enumerate(levels):
        if name is None:
            continue
        if found and found[-1][2] == name and sum(found[-1][:2]) == at:
            found[-1] = (found[-1][0], found[-1][1] + 1, name)
        else:
            found.append((at, 1, name))
    return found


def _ticks(edges: Sequence[tuple[float, float]]) -> list[Tick]:
    """Round places, where their column is: columns hold equal numbers of points, not of steps."""
    first, last = edges[0][0], edges[-1][1]
    rough = max(1.0, (last - first) / _TICKS)
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * ten for nice in (1, 2, 5, 10) if nice * ten >= rough)
    found = []
    for count in range(math.ceil(first / step), math.floor(last / step) + 1):
        column = next(index for index, (_, high) in enumerate(edges) if high >= count * step)
        found.append(Tick(round(100 * (column + 0.5) / len(edges), 2), f"{round(count * step):,}"))
    return found


def _marks(marks: Sequence[Mark], edges: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Those within the steps shown; of several in a column one, with all their words."""
    by_column: dict[int, list[Mark]] = {}
    for mark in marks:
        if edges[0][0] <= mark.step <= edges[-1][1]:
            column = next(index for index, (_, high) in enumerate(edges) if high >= mark.step)
            by_column.setdefault(column, []).append(mark)
    return [
        {
            "at": round(100 * (column + 0.5) / len(edges), 2),
            "kind": "bad" if any(mark.kind == "bad" for mark in some) else some[0].kind,
            "text": "; ".join(mark.text for mark in some[:3])
            + (f" and {len(some) - 3} more" if len(some) > 3 else ""),
        }
        for column, some in sorted(by_column.items())
    ]


def _line(strip: Strip, says: Say) -> tuple[str, str, str, str]:
    """Name, place, newest and largest value in words."""
    finite = [value for value in strip.y if math.isfinite(value)]
    return (
        strip.name,
        strip.place,
        _told(strip.y[-1], says),
        _told(max(finite), says) if finite else formatting.DASH,
    )


def _told(value: float, says: Say) -> str:
    return (
        says(value) if math.isfinite(value) else "not a number" if math.isnan(value) else "infinite"
    )


def _plain(place: float) -> int | float:
    return int(place) if float(place).is_integer() else place
