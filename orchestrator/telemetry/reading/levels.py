"""Reads one metric of each writer, with as many points as a chart or an export needs.

Handles levels, windows and tails. Does not choose between attempts and ranks (`merge`) and does not
check permissions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.telemetry.models import Chunk, Cursor, Series, Tail
from orchestrator.telemetry.packing import pyramid
from orchestrator.telemetry.packing.chunks import (
    CHUNK,
    Curve,
    Floats,
    Mask,
    join_curves,
    metric_curve,
    unpack_block,
    unpack_curve,
)

Bytes = bytes | memoryview

_FETCH = 512  # chunks per query
# chunks read for their large range: a summary shows only one spike up and one down
_WIDEST = 48


@dataclass(frozen=True, slots=True)
class Window:
    """Selects points; `axis` indexes `pyramid.AXES`, `without` are inclusive ranges of steps."""

    axis: int = 1
    low: float = -math.inf
    high: float = math.inf
    after_seq: int | None = None
    without: tuple[tuple[int, int], ...] = ()

    @property
    def unbounded(self) -> bool:
        """Whether the window selects every point."""
        return (
            self.low == -math.inf
            and self.high == math.inf
            and self.after_seq is None
            and not self.without
        )

    def points(self, curve: Curve) -> Curve:
        """The points of the curve inside the window."""
        if self.unbounded or not len(curve):
            return curve
        place = curve.time if self.axis == 3 else curve.axes[self.axis]
        keep: Mask = (place >= self.low) & (place <= self.high)
        if self.after_seq is not None:
            keep &= curve.seq > self.after_seq
        for first, last in self.without:
            keep &= (curve.step < first) | (curve.step > last)
        return curve.take(keep)

    def summaries(self, rows: Floats) -> tuple[Mask, Mask]:
        """Masks of the summaries that lie completely inside, and of those that overlap."""
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
    """One metric of one writer: its chunks and its newest points, which are not in chunks yet."""

    attempt: int
    rank: int
    series: Series | None
    tail: Curve
    # each chunk's points, their number and whether they are thinned, if read before (`with_chunks`)
    chunks: tuple[tuple[Curve, int, bool], ...] | None = None

    @property
    def total(self) -> int:
        """Number of points."""
        return (self.series.points if self.series else 0) + len(self.tail)

    @property
    def last_seq(self) -> int:
        """The newest point's sequence number."""
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
class ReadPoints:
    """Points read from a source; unless `exact`, some represent the 256 points around them."""

    points: Curve
    total: int
    exact: bool


def sources(
    run_id: int, name: str, *, rank: int | None = None, attempt: int | None = None
) -> list[Source]:
    """All writers of the metric, newest attempt first, then by rank; three queries."""
    return sources_of_runs([run_id], name, rank=rank, attempt=attempt)[run_id]


def sources_of_runs(
    run_ids: Collection[int], name: str, *, rank: int | None = None, attempt: int | None = None
) -> dict[int, list[Source]]:
    """`sources` of each run; three queries for any number of runs."""
    writers = Cursor.objects.filter(run_id__in=run_ids, stream="points")
    rows = Series.objects.filter(run_id__in=run_ids, name=name)
    if rank is not None:
        writers, rows = writers.filter(rank=rank), rows.filter(rank=rank)
    if attempt is not None:
        writers, rows = writers.filter(attempt=attempt), rows.filter(attempt=attempt)
    quoted = json.dumps(name)
    with_metric = {
        cursor: key
        for cursor, latest, *key in writers.values_list("id", "latest", "run_id", "attempt", "rank")
        if quoted in latest
    }
    # reads tails before series: points that move to a chunk meanwhile appear twice, and `load`
    # and `iterate` drop the duplicates
    tails: dict[tuple[int, int, int], list[Curve]] = {}
    for cursor, data in (
        Tail.objects.filter(cursor_id__in=with_metric)
        .order_by("id")
        .values_list("cursor_id", "data")
    ):
        run, attempt_, rank_ = with_metric[cursor]
        curve = metric_curve(unpack_block(data), name)
        tails.setdefault((run, attempt_, rank_), []).append(curve)
    by_writer = {(row.run_id, row.attempt, row.rank): row for row in rows}
    result: dict[int, list[Source]] = {run_id: [] for run_id in run_ids}
    for key in sorted({*by_writer, *tails}, key=lambda key: (key[0], -key[1], key[2])):
        series, tail = by_writer.get(key), join_curves(tails.get(key, []))
        if series is not None or len(tail):
            result[key[0]].append(Source(key[1], key[2], series, tail))
    return result


def with_chunks(sources: Collection[Source], *, most: int) -> list[Source]:
    """The sources, those of at most `most` chunks with their chunks; a query per 512 chunks."""
    batches: list[list[int]] = [[]]
    room = _FETCH
    for source in sources:
        if source.series is None or not 0 < source.series.chunks <= most:
            continue
        if source.series.chunks > room and batches[-1]:
            batches.append([])
            room = _FETCH
        batches[-1].append(source.series.id)
        room -= source.series.chunks
    read: dict[int, list[tuple[Curve, int, bool]]] = {}
    for batch in filter(None, batches):
        rows = Chunk.objects.filter(series_id__in=batch, level=0).order_by("series_id", "index")
        for series_id, summary, data in rows.values_list("series_id", "summary", "data"):
            read.setdefault(series_id, []).append(_chunk(data, summary))
    return [
        replace(source, chunks=tuple(read[source.series.id]))
        if source.series is not None and source.series.id in read
        else source
        for source in sources
    ]


@dataclass(slots=True)
class _Node:
    """Chunks of one level by index, with their summaries."""

    level: int
    index: list[int] = field(default_factory=list)
    rows: Floats = field(default_factory=lambda: np.zeros((0, pyramid.WIDTH)))


def load(source: Source, window: Window, *, enough: int) -> ReadPoints:
    """The source's points in the window by step: exact if in fewer than `enough` chunks.

    Otherwise by summaries; those at the window's edges are replaced by their points, so totals are
    always exact.
    """
    read, represented, exact = [window.points(source.tail)], 0, True
    marks: list[Curve] = []
    unread = source.series is not None and source.series.chunks and source.chunks is None
    nodes = _top(source.series) if source.series is not None and unread else []
    for curve, count, thinned in source.chunks or ():
        points = window.points(curve)
        if thinned:
            exact = False
            represented += count if len(points) == len(curve) else len(points)
        (marks if thinned else read).append(points)
    while nodes:
        overlaps = []
        for node in nodes:
            inside, touched = window.summaries(node.rows)
            overlaps.append((node, inside, touched))
        open_all = sum(int(touched.sum()) for _, _, touched in overlaps) < enough
        nodes = []
        for node, inside, touched in overlaps:
            opened = touched if open_all else touched & (~inside | _widest(node))
            summarized = touched & ~opened
            if summarized.any():
                exact = False
                represented += int(node.rows[summarized, pyramid.COUNT].sum())
                marks.append(pyramid.marks(node.rows[summarized]))
            if not opened.any():
                continue
            if node.level == 0:
                for curve, count, thinned in _curves(source, node, opened):
                    points = window.points(curve)
                    if thinned:
                        exact = False
                        represented += count if len(points) == len(curve) else len(points)
                    (marks if thinned else read).append(points)
            else:
                nodes.append(_children(source, node, opened))
    points = join_curves(read).once()
    return ReadPoints(join_curves([points, *marks]).sorted(), len(points) + represented, exact)


def iterate(source: Source, window: Window) -> Iterator[Curve]:
    """All points in the window in order of arrival, once each, a few hundred chunks at a time."""
    tail = source.tail
    if source.series and source.series.chunks:
        for start in range(0, source.series.chunks, _FETCH):
            rows = _rows(source, 0, start, start + _FETCH - 1)
            curve = join_curves([_unpack_or_marks(data, summary) for _, summary, data in rows])
            # points of the tail that moved to a chunk after the tail was read
            tail = tail.take(~np.isin(tail.seq, curve.seq))
            yield window.points(curve)
    yield window.points(tail)


def _widest(node: _Node) -> Mask:
    """The level-0 chunks with the largest range between minimum and maximum."""
    mask = np.zeros(len(node.rows), np.bool_)
    if node.level == 0:
        span = np.nan_to_num(node.rows[:, pyramid.HIGH] - node.rows[:, pyramid.LOW], nan=-1.0)
        mask[np.argsort(span)[-_WIDEST:]] = True
    return mask


def _top(series: Series) -> list[_Node]:
    """Nodes of the highest levels that cover each point in chunks exactly once."""
    counts = [series.chunks]
    full = series.chunks - (1 if series.open else 0)
    while full >= CHUNK:
        full //= CHUNK
        counts.append(full)
    counts.append(0)
    nodes = []
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
            nodes.append(_Node(level, [index for index, _ in pairs], stacked))
    return nodes[::-1]


def _children(source: Source, node: _Node, opened: Mask) -> _Node:
    """The opened nodes' summaries one level down."""
    child = _Node(node.level - 1)
    chosen = [index for index, wanted in zip(node.index, opened, strict=True) if wanted]
    rows = []
    for index, _, data in _rows(source, node.level, chosen[0], chosen[-1], only=set(chosen)):
        rows.append(pyramid.unpack(data))
        child.index += range(index * CHUNK, (index + 1) * CHUNK)
    child.rows = np.concatenate(rows) if rows else child.rows
    return child


def _curves(source: Source, node: _Node, opened: Mask) -> Iterator[tuple[Curve, int, bool]]:
    """Points of level-0 chunks, the chunk's number of points, and whether it is thinned."""
    chosen = [index for index, wanted in zip(node.index, opened, strict=True) if wanted]
    for start in range(0, len(chosen), _FETCH):
        part = chosen[start : start + _FETCH]
        for _, summary, data in _rows(source, 0, part[0], part[-1], only=set(part)):
            yield _chunk(data, summary)


def _chunk(data: Bytes, summary: Bytes) -> tuple[Curve, int, bool]:
    return _unpack_or_marks(data, summary), int(np.frombuffer(summary)[pyramid.COUNT]), not data


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


def _unpack_or_marks(data: Bytes, summary: Bytes) -> Curve:
    return unpack_curve(data) if data else pyramid.marks(np.frombuffer(summary)[None, :])
