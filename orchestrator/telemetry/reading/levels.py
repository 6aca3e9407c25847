"""Reading one metric back: which writers have it, and as many of its points as a chart or an export
needs.

Knows levels, windows and tails; does not know which attempt or rank wins (`merge`) nor who may
look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.telemetry.models import Chunk, Cursor, Series, Tail
from orchestrator.telemetry.packing import pyramid
from orchestrator.telemetry.packing.chunks import (
    CHUNK,
    Curve,
    Floats,
    Mask,
    curve_of,
    join_curves,
    unpack_block,
    unpack_curve,
)

Bytes = bytes | memoryview

_FETCH = 512  # chunks a query
# chunks opened for their large range: a summary shows one spike up and one down, they may hold more
_WIDEST = 48


@dataclass(frozen=True, slots=True)
class Window:
    """Which points are wanted: `axis` is an index into `pyramid.AXES`; `without` are ranges of
    steps, ends included.
    """

    axis: int = 1
    low: float = -math.inf
    high: float = math.inf
    after_seq: int | None = None
    without: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> bool:
        return (
            self.low == -math.inf
            and self.high == math.inf
            and self.after_seq is None
            and not self.without
        )

    def points(self, curve: Curve) -> Curve:
        """The wanted ones of these points."""
        if self.whole or not len(curve):
            return curve
        place = curve.time if self.axis == 3 else curve.axes[self.axis]
        keep: Mask = (place >= self.low) & (place <= self.high)
        if self.after_seq is not None:
            keep &= curve.seq > self.after_seq
        for first, last in self.without:
            keep &= (curve.step < first) | (curve.step > last)
        return curve.take(keep)

    def summaries(self, rows: Floats) -> tuple[Mask, Mask]:
        """Which of these summaries lie wholly inside, and which at least partly."""
        low, high = (
            rows[:, pyramid.place(self.axis, pyramid.FROM)],
            rows[:, pyramid.place(self.axis, pyramid.TO)],
        )
        inside: Mask = (low >= self.low) & (high <= self.high)
        touched: Mask = (high >= self.low) & (low <= self.high)
        if self.after_seq is not None:
            inside &= rows[:, pyramid.place(0, pyramid.FROM)] > self.after_seq
            touched &= rows[:, pyramid.place(0, pyramid.TO)] > self.after_seq
        from_step, to_step = (
            rows[:, pyramid.place(1, pyramid.FROM)],
            rows[:, pyramid.place(1, pyramid.TO)],
        )
        for first, last in self.without:
            inside &= (to_step < first) | (from_step > last)
            touched &= (from_step < first) | (to_step > last)
        return inside, touched


@dataclass(frozen=True, slots=True)
class Source:
    """One metric of one writer: its chunks, and its newest points that are not in chunks yet."""

    attempt: int
    rank: int
    series: Series | None
    tail: Curve

    @property
    def total(self) -> int:
        return (self.series.points if self.series else 0) + len(self.tail)

    @property
    def last_seq(self) -> int:
        in_chunks = self.series.last_seq if self.series else 0
        return max(in_chunks, int(self.tail.seq.max())) if len(self.tail) else in_chunks

    @property
    def steps(self) -> tuple[int, int]:
        """Smallest and largest step."""
        ends = (
            [(self.series.first_step, self.series.last_step)]
            if self.series and self.series.points
            else []
        )
        if len(self.tail):
            ends.append((int(self.tail.step.min()), int(self.tail.step.max())))
        return min(first for first, _ in ends), max(last for _, last in ends)


@dataclass(slots=True)
class Part:
    """What was read of a source. Not `exact`: some of the points stand for the 256 around them."""

    points: Curve
    total: int
    exact: bool


def sources(
    run_id: int, name: str, *, rank: int | None = None, attempt: int | None = None
) -> list[Source]:
    """All writers that have the metric, newest attempt first, then by rank. Three queries."""
    writers = Cursor.objects.filter(run_id=run_id, stream="points")
    rows = Series.objects.filter(run_id=run_id, name=name)
    if rank is not None:
        writers, rows = writers.filter(rank=rank), rows.filter(rank=rank)
    if attempt is not None:
        writers, rows = writers.filter(attempt=attempt), rows.filter(attempt=attempt)
    marked = json.dumps(name)
    having = {
        cursor: (of_attempt, of_rank)
        for cursor, of_attempt, of_rank, latest in writers.values_list(
            "id", "attempt", "rank", "latest"
        )
        if marked in latest
    }
    # tails before series: what moves into a chunk in between is then seen twice, never missed;
    # `load` drops the double
    tails: dict[tuple[int, int], list[Curve]] = {}
    for cursor, data in (
        Tail.objects.filter(cursor_id__in=having).order_by("id").values_list("cursor_id", "data")
    ):
        tails.setdefault(having[cursor], []).append(curve_of(unpack_block(data), name))
    by_writer = {(row.attempt, row.rank): row for row in rows}
    found = []
    for key in sorted({*by_writer, *tails}, key=lambda key: (-key[0], key[1])):
        series, tail = by_writer.get(key), join_curves(tails.get(key, []))
        if series is not None or len(tail):
            found.append(Source(*key, series, tail))
    return found


@dataclass(slots=True)
class _Node:
    """Chunks of one level by index, with their summaries."""

    level: int
    index: list[int] = field(default_factory=list)
    rows: Floats = field(default_factory=lambda: np.zeros((0, pyramid.WIDTH)))


def load(source: Source, window: Window, *, enough: int) -> Part:
    """The source's wanted points by step: exact where they lie in fewer than `enough` chunks, else
    by summaries.

    Summaries that a window's edge cuts through are opened, so totals are exact whatever the level.
    """
    read, marked, behind_marks, exact = [window.points(source.tail)], [], 0, True
    nodes = _top(source.series) if source.series and source.series.chunks else []
    while nodes:
        wanted = []
        for node in nodes:
            inside, touched = window.summaries(node.rows)
            wanted.append((node, inside, touched))
        open_all = sum(int(touched.sum()) for _, _, touched in wanted) < enough
        nodes = []
        for node, inside, touched in wanted:
            opened = touched if open_all else touched & (~inside | _widest(node))
            kept = touched & ~opened
            if kept.any():
                exact = False
                behind_marks += int(node.rows[kept, pyramid.COUNT].sum())
                marked.append(pyramid.marks(node.rows[kept]))
            if not opened.any():
                continue
            if node.level == 0:
                for curve, count, thinned in _curves(source, node, opened):
                    points = window.points(curve)
                    if thinned:
                        exact = False
                        behind_marks += count if len(points) == len(curve) else len(points)
                    (marked if thinned else read).append(points)
            else:
                nodes.append(_children(source, node, opened))
    points = join_curves(read).once()
    return Part(join_curves([points, *marked]).sorted(), len(points) + behind_marks, exact)


def iterate(source: Source, window: Window) -> Iterator[Curve]:
    """All wanted points, a few hundred chunks at a time, in order of arrival."""
    if source.series and source.series.chunks:
        for start in range(0, source.series.chunks, _FETCH):
            rows = _rows(source, 0, start, start + _FETCH - 1)
            curves = [_opened(data, summary) for _, summary, data in rows]
            yield window.points(join_curves(curves))
    yield window.points(source.tail)


def _widest(node: _Node) -> Mask:
    """The level-0 chunks with the largest range between minimum and maximum."""
    found = np.zeros(len(node.rows), np.bool_)
    if node.level == 0:
        span = np.nan_to_num(node.rows[:, pyramid.HIGH] - node.rows[:, pyramid.LOW], nan=-1.0)
        found[np.argsort(span)[-_WIDEST:]] = True
    return found


def _top(series: Series) -> list[_Node]:
    """Everything in chunks, each point under exactly one node, by the highest levels there are."""
    counts = [series.chunks]
    full = series.chunks - (1 if series.open else 0)
    while full >= CHUNK:
        full //= CHUNK
        counts.append(full)
    counts.append(0)
    found = []
    for level in range(len(counts) - 1):
        start = counts[level + 1] * CHUNK
        rows = Chunk.objects.filter(
            series_id=series.id, level=level, index__gte=start, index__lt=counts[level]
        )
        pairs = list(rows.order_by("index").values_list("index", "summary"))
        if pairs:
            stacked = np.frombuffer(b"".join(bytes(summary) for _, summary in pairs)).reshape(
                -1, pyramid.WIDTH
            )
            found.append(_Node(level, [index for index, _ in pairs], stacked))
    return found[::-1]


def _children(source: Source, node: _Node, opened: Mask) -> _Node:
    """The summaries one level down."""
    child = _Node(node.level - 1)
    chosen = [index for index, wanted in zip(node.index, opened, strict=True) if wanted]
    rows = []
    for index, _, data in _rows(source, node.level, chosen[0], chosen[-1], only=set(chosen)):
        rows.append(pyramid.unpack(data))
        child.index += range(index * CHUNK, (index + 1) * CHUNK)
    child.rows = np.concatenate(rows) if rows else child.rows
    return child


def _curves(source: Source, node: _Node, opened: Mask) -> Iterator[tuple[Curve, int, bool]]:
    """Points of level-0 chunks, how many the chunk has, and whether only its summary is left."""
    chosen = [index for index, wanted in zip(node.index, opened, strict=True) if wanted]
    for start in range(0, len(chosen), _FETCH):
        part = chosen[start : start + _FETCH]
        for _, summary, data in _rows(source, 0, part[0], part[-1], only=set(part)):
            curve = _opened(data, summary)
            yield curve, int(np.frombuffer(summary)[pyramid.COUNT]), not data


def _rows(
    source: Source, level: int, first: int, last: int, *, only: set[int] | None = None
) -> Sequence[tuple[int, Bytes, Bytes]]:
    assert source.series is not None
    rows = Chunk.objects.filter(
        series_id=source.series.id, level=level, index__gte=first, index__lte=last
    )
    if only is not None and len(only) <= last - first:
        rows = rows.filter(index__in=only)
    return list(rows.order_by("index").values_list("index", "summary", "data"))


def _opened(data: Bytes, summary: Bytes) -> Curve:
    return unpack_curve(data) if data else pyramid.marks(np.frombuffer(summary)[None, :])
