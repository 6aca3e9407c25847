"""Packs writers' blocks into one chunk per metric, and 256 full chunks into a row one level up.

A full chunk is written once. Only a metric with gaps (validation loss) has an open chunk, which is
extended once per 256 points of its writer. Runs inside the caller's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from django.db import connection
from django.db.models import F

from orchestrator.telemetry.models import Chunk, Series
from orchestrator.telemetry.packing import pyramid
from orchestrator.telemetry.packing.chunks import (
    CHUNK,
    Block,
    Curve,
    Floats,
    join_curves,
    missing,
    pack_axes,
    pack_curve,
    row_curve,
    select,
    unpack_curve,
)
from orchestrator.telemetry.writing.cursors import Writer

_EXTEND = "UPDATE telemetry_chunk SET last_time = %s, summary = %s, data = %s WHERE id = %s"
_SERIES = (
    "UPDATE telemetry_series SET points = %s, chunks = %s, open = %s, last_seq = %s, "
    "first_step = %s, last_step = %s, last_time = %s, non_finite = %s, ordered = %s WHERE id = %s"
)
_CHUNK_ROWS = 200  # rows per INSERT


@dataclass(slots=True)
class _PendingRows:
    """Rows to write, collected over all metrics."""

    new: list[Chunk] = field(default_factory=list)
    extended: list[tuple[Any, ...]] = field(default_factory=list)
    # with the number of full chunks before this call
    series: list[tuple[Series, int]] = field(default_factory=list)


def compact(blocks: list[tuple[Writer, Block]]) -> None:
    """Pack blocks into chunks; each block's length is a multiple of 256."""
    series = _get_series(blocks)
    open_chunks = _open_chunks([row for row in series.values() if row.open])
    pending = _PendingRows()
    for writer, block in blocks:
        order = np.argsort(block.step, kind="stable")
        block = block if np.array_equal(order, np.arange(len(block))) else select(block, order)
        gaps: list[bool] = np.any(missing(block.values), axis=1).tolist()
        aligned = []
        for row, name in enumerate(block.names):
            entry = series[writer, name]
            if gaps[row] or entry.open:
                curve = row_curve(block, row)
                if len(curve):
                    _extend(pending, entry, open_chunks.get(entry.id), curve)
            else:
                aligned.append((row, entry))
        if aligned:
            _fill(pending, block, aligned)
    _write(pending)


def _get_series(blocks: list[tuple[Writer, Block]]) -> dict[tuple[Writer, str], Series]:
    wanted = {(writer, name) for writer, block in blocks for name in block.names}
    rows = Series.objects.filter(
        run_id__in={writer.run_id for writer, _ in blocks},
        attempt__in={writer.attempt for writer, _ in blocks},
        rank__in={writer.rank for writer, _ in blocks},
    )
    series = {(Writer(row.run_id, row.attempt, row.rank), row.name): row for row in rows}
    new = [Series(**writer._asdict(), name=name) for writer, name in sorted(wanted - series.keys())]
    for row in Series.objects.bulk_create(new):
        series[Writer(row.run_id, row.attempt, row.rank), row.name] = row
    return series


def _open_chunks(series: list[Series]) -> dict[int, Chunk]:
    rows = Chunk.objects.filter(series__in=series, level=0, index=F("series__chunks") - 1)
    return {row.series_id: row for row in rows}


def _fill(pending: _PendingRows, block: Block, aligned: list[tuple[int, Series]]) -> None:
    """Add full chunks of metrics that every point has; packs their shared axes once."""
    values = block.values[[row for row, _ in aligned]]
    full = Curve(block.axes, block.time, values[0])
    for start in range(0, len(block), CHUNK):
        part = slice(start, start + CHUNK)
        axes, time = block.axes[:, part], np.ascontiguousarray(block.time[part])
        packed = pack_axes(axes, time)
        last_time = float(time.max())
        summaries = pyramid.summarize_rows(
            np.concatenate([axes.astype(np.float64), time[None]]), values[:, part]
        )
        for number, (_, series) in enumerate(aligned):
            data = pack_curve(Curve(axes, time, values[number, part]), packed)
            index = series.chunks + start // CHUNK
            pending.new.append(
                Chunk(
                    series=series,
                    index=index,
                    last_time=last_time,
                    summary=summaries[number].tobytes(),
                    data=data,
                )
            )
    bad = (~np.isfinite(values)).sum(axis=1).tolist()
    for number, (_, series) in enumerate(aligned):
        pending.series.append((series, series.chunks))
        _update_series(series, full, bad[number])
        series.chunks += len(block) // CHUNK


def _extend(pending: _PendingRows, series: Series, last: Chunk | None, curve: Curve) -> None:
    """Extend the open chunk and add new ones; the last may stay open."""
    pending.series.append((series, series.chunks - (1 if series.open else 0)))
    _update_series(series, curve, int((~np.isfinite(curve.y)).sum()))
    if last is not None:
        curve = join_curves([unpack_curve(last.data), curve])
        series.chunks -= 1
    for start in range(0, len(curve), CHUNK):
        part = curve.take(np.arange(start, min(start + CHUNK, len(curve))))
        row = (float(part.time.max()), pyramid.summarize(part).tobytes(), pack_curve(part))
        if last is not None and start == 0:
            pending.extended.append((*row, last.id))
        else:
            pending.new.append(
                Chunk(
                    series=series,
                    index=series.chunks,
                    last_time=row[0],
                    summary=row[1],
                    data=row[2],
                )
            )
        series.chunks += 1
    series.open = len(curve) % CHUNK


def _update_series(series: Series, curve: Curve, bad: int) -> None:
    """Include these points, `bad` of them not finite, in the series' totals."""
    step = curve.step
    first, last = int(step.min()), int(step.max())
    ascending = bool(np.all(step[1:] > step[:-1])) and (
        not series.points or int(step[0]) > series.last_step
    )
    series.ordered = series.ordered and ascending
    series.first_step = min(series.first_step, first) if series.points else first
    series.last_step = max(series.last_step, last) if series.points else last
    series.last_seq = max(series.last_seq, int(curve.seq.max()))
    series.last_time = max(series.last_time, float(curve.time.max()))
    series.points += len(curve)
    series.non_finite += bad


def _write(pending: _PendingRows) -> None:
    Chunk.objects.bulk_create(pending.new, batch_size=_CHUNK_ROWS)
    rows: list[tuple[Any, ...]] = [
        (
            row.points,
            row.chunks,
            row.open,
            row.last_seq,
            row.first_step,
            row.last_step,
            row.last_time,
            row.non_finite,
            row.ordered,
            row.id,
        )
        for row, _ in pending.series
    ]
    with connection.cursor() as sql:
        if pending.extended:
            sql.executemany(_EXTEND, pending.extended)
        if rows:
            sql.executemany(_SERIES, rows)
    for series, before in pending.series:
        _add_levels(series, before, series.chunks - (1 if series.open else 0))


def _add_levels(series: Series, before: int, after: int) -> None:
    """Write the rows of the levels above, one per 256 chunks that became full."""
    level = 1
    while after // CHUNK > before // CHUNK:
        before, after = before // CHUNK, after // CHUNK
        for index in range(before, after):
            below = _summaries(series, level - 1, index)
            Chunk.objects.create(
                series=series,
                level=level,
                index=index,
                last_time=float(below[-1, pyramid.place(3, pyramid.TO)]),
                summary=pyramid.merge(below).tobytes(),
                data=pyramid.pack(below),
            )
        level += 1


def _summaries(series: Series, level: int, index: int) -> Floats:
    rows = Chunk.objects.filter(
        series=series, level=level, index__gte=index * CHUNK, index__lt=(index + 1) * CHUNK
    ).order_by("index")
    packed = b"".join(bytes(summary) for summary in rows.values_list("summary", flat=True))
    return np.frombuffer(packed).reshape(-1, pyramid.WIDTH)
