"""Every metric of a run in a few numbers, from summaries and newest points.

A run with one attempt is read in a few queries; one with several is merged metric by metric.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from django.db.models import Case, Exists, F, OuterRef, When

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import (
    Chunk,
    Cursor,
    MetricSummary,
    Series,
    StaleSummary,
    Tail,
)
from orchestrator.telemetry.packing import pyramid
from orchestrator.telemetry.packing.chunks import CHUNK, Floats, missing, unpack_block
from orchestrator.telemetry.reading.levels import Window, sources
from orchestrator.telemetry.reading.merge import merge
from workers.contracts.catalog.metrics import METRICS

MOST_NAMES: Final = 200  # metrics of a run in the runs table; known metrics first
MOST_COMPUTED: Final = 20  # runs of one request whose points are read
MOST_READ: Final = 200  # metrics of one request whose points are read
_EXACT_CHUNKS: Final = 256


class Numbers(NamedTuple):
    """A metric of a run in a few finite numbers; None without any."""

    last: float | None
    min: float | None
    max: float | None
    mean: float | None
    median: float | None


@dataclass(slots=True)
class Totals:
    """Of the finite numbers of one metric; `last` is the value at the highest step."""

    last: float | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    points: int = 0
    _parts: list[tuple[Floats, Floats]] = field(default_factory=list)  # values and their points

    @property
    def median(self) -> float | None:
        """The median; exact for the newest points and for several attempts.

        Full chunks of 256 points count as their mean, 256 times.
        """
        if not self._parts:
            return None
        values = np.concatenate([values for values, _ in self._parts])
        weights = np.concatenate([weights for _, weights in self._parts])
        order = np.argsort(values, kind="stable")
        values, reached = values[order], np.cumsum(weights[order])
        low = int(np.searchsorted(reached, reached[-1] / 2))
        # as many points on both sides: the mean of the two in the middle
        even = bool(reached[low] == reached[-1] / 2)
        high = min(low + int(even), len(values) - 1)
        return float(values[low] + values[high]) / 2

    def add_values(self, values: Floats, weights: Floats) -> None:
        """Add what the median is computed of."""
        self._parts.append((values, weights))

    def add(self, low: float, high: float, mean: float, count: int) -> None:
        """Add `count` finite points; nothing if there are none."""
        if count <= 0:
            return
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        total = (self.mean or 0.0) * self.points + mean * count
        self.points += count
        self.mean = total / self.points


def metric_totals(*, run: Run) -> dict[str, Totals]:
    """`{metric: Totals}` of at most `MOST_NAMES` metrics, of the lowest rank that has each."""
    rows = Cursor.objects.filter(run=run, stream="points").order_by("-attempt", "rank")
    owner: dict[str, tuple[int, int]] = {}  # metric → attempt and rank
    last: dict[str, float] = {}
    cursors: dict[tuple[int, int], int] = {}
    for id, attempt, rank, text in rows.values_list("id", "attempt", "rank", "latest"):
        cursors[attempt, rank] = id
        for name, (_, value) in json.loads(text).items():
            if name not in owner:
                owner[name], last[name] = (attempt, rank), float(value)
    names = sorted(owner, key=lambda name: (name not in METRICS, name.count("/"), name))
    names = names[:MOST_NAMES]
    if len({attempt for attempt, _ in cursors}) > 1 or run.rewinds:
        totals = {name: _merged(run, name) for name in names}
    else:
        totals = {name: Totals() for name in names}
        _add_chunks(run, totals, owner)
        _add_tails(totals, owner, cursors)
    for name, value in totals.items():
        value.last = last[name] if np.isfinite(last[name]) else None
    return totals


def current_numbers(runs: Iterable[Run]) -> dict[int, dict[str, Numbers]]:
    """`{run: {metric: Numbers}}`: stored summaries; computed for runs with newer points.

    Computes those of at most 20 runs: first of runs without summaries, then of the newest ones.
    """
    by_id = {run.pk: run for run in runs}
    stale = _computed(by_id)
    numbers: dict[int, dict[str, Numbers]] = {id: {} for id in by_id}
    for id in stale:
        for name, total in metric_totals(run=by_id[id]).items():
            numbers[id][name] = Numbers(total.last, total.min, total.max, total.mean, total.median)
    rows = MetricSummary.objects.filter(run__in=by_id.keys() - stale)
    for id, name, *values in rows.values_list("run_id", "name", *Numbers._fields):
        numbers[id][name] = Numbers(*values)
    return numbers


def _computed(ids: Collection[int]) -> set[int]:
    """The runs whose points are read, because their stored summaries are old or missing."""
    stale = StaleSummary.objects.filter(run__in=ids)
    missing = ~Exists(MetricSummary.objects.filter(run=OuterRef("run")))
    ordered = stale.annotate(missing=missing).order_by("-missing", "-run_id")
    return set(ordered.values_list("run_id", flat=True)[:MOST_COMPUTED])


def numbers_of(runs: Iterable[Run], names: Collection[str]) -> dict[int, dict[str, Numbers]]:
    """As `current_numbers`, of these metrics only, also of those without a stored summary.

    Reads the points of at most `MOST_READ` metrics of runs that have no current summary.
    """
    by_id = {run.pk: run for run in runs}
    numbers: dict[int, dict[str, Numbers]] = {id: {} for id in by_id}
    stale = set(
        StaleSummary.objects.filter(run__in=by_id)
        .order_by("-run_id")
        .values_list("run_id", flat=True)[:MOST_COMPUTED]
    )
    rows = MetricSummary.objects.filter(run__in=by_id, name__in=names)
    for id, name, *values in rows.values_list("run_id", "name", *Numbers._fields):
        numbers[id][name] = Numbers(*values)
    wanted = [
        (run, name)
        for id, run in by_id.items()
        for name in names
        if id in stale or name not in numbers[id]
    ]
    for run, name in wanted[:MOST_READ]:
        total = _merged(run, name)
        if total.points:
            numbers[run.pk][name] = Numbers(
                total.last, total.min, total.max, total.mean, total.median
            )
    return numbers


def medians(run_ids: Collection[int], names: Collection[str]) -> dict[int, dict[str, float]]:
    """`{run: {metric: median}}` of the stored summaries of these metrics; one query."""
    rows = MetricSummary.objects.filter(run_id__in=run_ids, name__in=names, median__isnull=False)
    result: dict[int, dict[str, float]] = {}
    for id, name, value in rows.values_list("run_id", "name", "median"):
        if value is not None:
            result.setdefault(id, {})[name] = value
    return result


def _merged(run: Run, name: str) -> Totals:
    merged = merge(sources(run.pk, name), Window(), enough=_EXACT_CHUNKS, rewinds=run.rewinds)
    totals = Totals()
    _add_values(totals, merged.points.y)
    if len(merged.points) and np.isfinite(merged.points.y[-1]):
        totals.last = float(merged.points.y[-1])
    return totals


def _add_values(totals: Totals, values: Floats) -> None:
    values = values[np.isfinite(values)]
    if len(values):
        totals.add(float(values.min()), float(values.max()), float(values.mean()), len(values))
        totals.add_values(values, np.ones(len(values)))


def _add_chunks(run: Run, totals: dict[str, Totals], owner: dict[str, tuple[int, int]]) -> None:
    rows = Series.objects.filter(run=run, name__in=totals).values_list(
        "id", "name", "attempt", "rank"
    )
    names = {id: name for id, name, attempt, rank in rows if owner[name] == (attempt, rank)}
    # a level-1 row holds the summaries of 256 full chunks; later chunks are read one by one
    full = F("series__chunks") - Case(When(series__open__gt=0, then=1), default=0)
    full -= full % CHUNK
    later = Chunk.objects.filter(series_id__in=names, level=0, index__gte=full)
    for id, summary in later.values_list("series_id", "summary"):
        _add_rows(totals[names[id]], np.frombuffer(summary)[None, :])
    packed = Chunk.objects.filter(series_id__in=names, level=1)
    for id, data in packed.values_list("series_id", "data"):
        _add_rows(totals[names[id]], pyramid.unpack(data))


def _add_rows(totals: Totals, rows: Floats) -> None:
    good = rows[:, pyramid.COUNT] - rows[:, pyramid.BAD]
    rows, good = rows[good > 0], good[good > 0]
    if len(rows):
        mean = float((rows[:, pyramid.MEAN] * good).sum() / good.sum())
        low, high = float(rows[:, pyramid.LOW].min()), float(rows[:, pyramid.HIGH].max())
        totals.add(low, high, mean, int(good.sum()))
        totals.add_values(rows[:, pyramid.MEAN], good)


def _add_tails(
    totals: dict[str, Totals],
    owner: dict[str, tuple[int, int]],
    cursors: dict[tuple[int, int], int],
) -> None:
    writer = {id: key for key, id in cursors.items()}
    wanted = {cursors[owner[name]] for name in totals}
    for cursor, data in Tail.objects.filter(cursor_id__in=wanted).values_list("cursor_id", "data"):
        block = unpack_block(data)
        absent = missing(block.values)
        for row, name in enumerate(block.names):
            if name in totals and owner[name] == writer[cursor]:
                _add_values(totals[name], block.values[row][~absent[row]])
