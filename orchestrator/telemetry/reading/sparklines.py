"""Sparklines of one metric for a page of runs, in four queries for any number of runs.

Returns a limited number of values per run, including its extremes. Does not draw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

import numpy as np
from django.db.models import Case, F, Q, When

from orchestrator.telemetry.models import Chunk, Cursor, Series, Tail
from orchestrator.telemetry.packing import pyramid
from orchestrator.telemetry.packing.chunks import (
    CHUNK,
    Curve,
    join_curves,
    metric_curve,
    unpack_block,
    unpack_curve,
)
from orchestrator.telemetry.packing.reduce import reduce

Bytes = bytes | memoryview

_SHORT: Final = 4  # chunks; longer series are read by their summaries


def sparkline(*, run_ids: Iterable[int], name: str, points: int = 40) -> dict[int, list[float]]:
    """`{run: [value, ...]}`: finite values by step of the newest attempt's lowest rank.

    Omits runs without the metric.
    """
    wanted = list(run_ids)
    best = _writers(wanted, name)
    rows = Series.objects.filter(run_id__in=wanted, name=name)
    series = {
        row.id: row.run_id
        for row in rows
        if (row.attempt, row.rank) == best.get(row.run_id, (0, 0, 0))[:2]
    }
    curves: dict[int, list[Curve]] = {}
    for series_id, level, data, summary in _chunks(list(series)):
        if level:
            curve = pyramid.marks(pyramid.unpack(data))
        else:
            curve = unpack_curve(data) if data else pyramid.marks(np.frombuffer(summary)[None, :])
        curves.setdefault(series[series_id], []).append(curve)
    run_by_cursor = {cursor: run_id for run_id, (_, _, cursor) in best.items()}
    tails = (
        Tail.objects.filter(cursor_id__in=run_by_cursor)
        .order_by("id")
        .values_list("cursor_id", "data")
    )
    for cursor, data in tails:
        curves.setdefault(run_by_cursor[cursor], []).append(metric_curve(unpack_block(data), name))
    return {run_id: _values(join_curves(parts), points) for run_id, parts in curves.items()}


def _writers(run_ids: list[int], name: str) -> dict[int, tuple[int, int, int]]:
    """`{run: (attempt, rank, cursor)}` of the writer to draw."""
    quoted = json.dumps(name)
    best: dict[int, tuple[int, int, int]] = {}
    rows = Cursor.objects.filter(run_id__in=run_ids, stream="points", latest__contains=quoted)
    rows = rows.order_by("-attempt", "rank")
    for run_id, attempt, rank, cursor in rows.values_list("run_id", "attempt", "rank", "id"):
        best.setdefault(run_id, (attempt, rank, cursor))
    return best


def _chunks(series: list[int]) -> list[tuple[int, int, Bytes, Bytes]]:
    """Rows `(series, level, data, summary)` that cover each series; long ones by summaries.

    A level-1 row covers 256 chunks; later chunks are read one by one, without their data.
    """
    short = Q(series__chunks__lte=_SHORT, level=0)
    rows = Chunk.objects.filter(Q(series_id__in=series) & (short | Q(level=1)))
    covering: list[tuple[int, int, Bytes, Bytes]] = list(
        rows.order_by("series_id", "index").values_list("series_id", "level", "data", "summary")
    )
    full = F("series__chunks") - Case(When(series__open__gt=0, then=1), default=0)
    full -= full % CHUNK
    rest = Chunk.objects.filter(
        series_id__in=series, level=0, series__chunks__gt=_SHORT, index__gte=full
    )
    summaries = rest.order_by("series_id", "index").values_list("series_id", "summary")
    return covering + [(series_id, 0, b"", summary) for series_id, summary in summaries]


def _values(curve: Curve, points: int) -> list[float]:
    curve = curve.once()
    curve = curve.take(np.isfinite(curve.y))
    values: list[float] = reduce(curve.step.astype(np.float64), curve.y, points).y.tolist()
    return values
