"""Lays out readings over time: heat strips of devices, and curves of a node. Pure functions.

All tracks of a page have the same columns of time, so they align. Cells of one color share one SVG
path; a curve is a polygon from minimum to maximum and a line of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from django.utils.translation import gettext as _

from webui.charts.gantt import Tick, time_ticks
from webui.charts.level_blocks import level_blocks
from webui.presentation import formatting

LEVELS: Final = 8
HEIGHT: Final = 100  # of a curve's box
_NAMED: Final = 16  # up to this many rows, each is named

Format = Callable[[float], str]
Values = Sequence[float]  # NaN: no reading


@dataclass(frozen=True, slots=True)
class Columns:
    """Equal columns of time; column i begins at `start + i * step_s`, Unix seconds."""

    start: int
    step_s: int
    count: int

    @property
    def since(self) -> datetime:
        """The start of the first column."""
        return datetime.fromtimestamp(self.start, UTC)

    @property
    def until(self) -> datetime:
        """The end of the last column."""
        return datetime.fromtimestamp(self.start + self.step_s * self.count, UTC)

    @property
    def ticks(self) -> list[Tick]:
        """Labels of the time axis."""
        return time_ticks(self.since, self.until)

    def place(self, time: datetime) -> float | None:
        """The position of a time in percent; None outside."""
        share = (time.timestamp() - self.start) / (self.step_s * self.count)
        return round(100 * share, 3) if 0 <= share <= 1 else None

    def labels(self) -> list[str]:
        """The time of each column as text."""
        shape = "%H:%M" if self.step_s * self.count <= 86_400 else "%d %b %H:%M"
        times = (self.start + at * self.step_s for at in range(self.count))
        return [f"{datetime.fromtimestamp(time, UTC):{shape}}" for time in times]


@dataclass(frozen=True, slots=True)
class Reading:
    """Statistics of one row by column."""

    name: str
    low: Values
    mean: Values
    high: Values


@dataclass(frozen=True, slots=True)
class Track:
    """One metric. `paths` are `(class, d)`, in a box of `columns` x `rows` or x `HEIGHT`.

    `cells` is what the pointer reads; `table` has a row per name: newest, mean and largest value.
    """

    id: str
    title: str
    kind: str  # heat | curve
    names: list[str]
    columns: int
    paths: list[tuple[str, str]]
    legend: list[tuple[str, str]]
    top: str
    summary: str
    cells: dict[str, Any]
    table: list[tuple[str, str, str, str]]
    hue: str = ""
    shown: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.names)


def heat_track(
    id: str,
    title: str,
    rows: Sequence[Reading],
    columns: Columns,
    *,
    format: Format,
    low: float = 0.0,
    high: float | None = None,
) -> Track | None:
    """A strip per device, colored by the mean from `low` to `high` (default: the largest mean).

    None if no row has a reading.
    """
    rows = [row for row in rows if not all(map(math.isnan, row.mean))]
    if not rows:
        return None
    top = high if high is not None else max(_known(row.mean, max) for row in rows)
    paths: dict[str, list[str]] = {}
    for number, row in enumerate(rows):
        for left, width, level in level_blocks([_level(value, low, top) for value in row.mean]):
            paths.setdefault(level, []).append(f"M{left} {number}h{width}v1h-{width}z")
    step = (top - low) / LEVELS
    legend = [(str(at), format(low + at * step)) for at in range(LEVELS + 1)]
    names = [row.name for row in rows]
    return Track(
        id=id,
        title=title,
        kind="heat",
        names=names,
        columns=columns.count,
        paths=[(level, "".join(parts)) for level, parts in sorted(paths.items())],
        legend=legend,
        top=format(top),
        summary=_summary(rows, format),
        cells=_cells(rows, columns, format),
        table=[_line(row, format) for row in rows],
        shown=names if len(names) <= _NAMED else [""] * len(names),
    )


def curve_track(
    id: str,
    title: str,
    row: Reading,
    columns: Columns,
    *,
    format: Format,
    hue: str,
    high: float | None = None,
) -> Track | None:
    """A line of means with the band from minimum to maximum, from zero; None without a reading."""
    if all(map(math.isnan, row.mean)):
        return None
    top = high if high is not None else (_known(row.high, max) or 1.0)

    def y(value: float) -> str:
        return f"{HEIGHT * (1 - min(1.0, max(0.0, value / top))):.1f}"

    line, band = [], []
    for first, last in _stretches(row.mean):
        xs = [at + 0.5 for at in range(first, last)]
        if len(xs) == 1:  # a single column is drawn over its width
            xs, places = [first, first + 1.0], [first, first]
        else:
            places = list(range(first, last))
        means = [f"{x:g} {y(row.mean[at])}" for x, at in zip(xs, places, strict=True)]
        highs = [f"{x:g} {y(row.high[at])}" for x, at in zip(xs, places, strict=True)]
        lows = [f"{x:g} {y(row.low[at])}" for x, at in zip(xs, places, strict=True)]
        line.append(f"M{'L'.join(means)}")
        band.append(f"M{'L'.join([*highs, *reversed(lows)])}z")
    return Track(
        id=id,
        title=title,
        kind="curve",
        names=[row.name],
        columns=columns.count,
        paths=[("band", "".join(band)), ("line", "".join(line))],
        legend=[],
        top=format(top),
        summary=_summary([row], format),
        cells=_cells([row], columns, format),
        table=[_line(row, format)],
        hue=hue,
        shown=[row.name],
    )


def _level(value: float, low: float, high: float) -> str | None:
    """The color of a value; 0 is the ground."""
    if math.isnan(value):
        return None
    share = (value - low) / (high - low) if high > low else 0.0
    return str(min(LEVELS, max(0, math.ceil(LEVELS * share))))


def _stretches(values: Values) -> list[tuple[int, int]]:
    """`(first, end)` of neighboring columns with readings."""
    blocks = level_blocks([None if math.isnan(value) else "1" for value in values])
    return [(left, left + width) for left, width, _level in blocks]


def _cells(rows: Sequence[Reading], columns: Columns, format: Format) -> dict[str, Any]:
    return {
        "names": [row.name for row in rows],
        "places": columns.labels(),
        "edges": [[0, 0]] * columns.count,
        "text": [
            [
                None if math.isnan(mean) else _cell(low, mean, high, format)
                for low, mean, high in zip(row.low, row.mean, row.high, strict=True)
            ]
            for row in rows
        ],
    }


def _cell(low: float, mean: float, high: float, format: Format) -> str:
    texts = format(low), format(mean), format(high)
    if texts[0] == texts[2]:
        return texts[1]
    return _("%(mean)s (%(low)s to %(high)s)") % {
        "mean": texts[1],
        "low": texts[0],
        "high": texts[2],
    }


def _summary(rows: Sequence[Reading], format: Format) -> str:
    means = [value for row in rows for value in row.mean if not math.isnan(value)]
    highest = max(rows, key=lambda row: _known(row.high, max))
    values = {
        "mean": format(sum(means) / len(means)),
        "most": format(_known(highest.high, max)),
        "name": highest.name,
    }
    if len(rows) == 1:
        return _("Mean %(mean)s, largest %(most)s.") % values
    return _("Mean %(mean)s, largest %(most)s on %(name)s.") % values


def _line(row: Reading, format: Format) -> tuple[str, str, str, str]:
    known = [value for value in row.mean if not math.isnan(value)]
    return (
        row.name,
        format(known[-1]),
        format(sum(known) / len(known)),
        format(_known(row.high, max)),
    )


def _known(values: Values, of: Callable[[list[float]], float]) -> float:
    some = [value for value in values if not math.isnan(value)]
    return of(some) if some else 0.0


def bytes_per_s(value: float) -> str:
    """A rate in decimal units: 12.5 MB/s."""
    for size, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if value >= size:
            return f"{formatting.quantity(value / size)} {unit}"
    return f"{value:.0f} B/s"
