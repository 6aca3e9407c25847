"""Lists a run's metrics with their ranks, attempts and numbers of points.

Does not read the points of chunks.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Sum

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor, Series, Tail
from orchestrator.telemetry.packing.chunks import missing, unpack_block
from workers.contracts.catalog.metrics import run_metric_unit


@dataclass(slots=True)
class SeriesEntry:
    """One metric; `points` counts all ranks and attempts."""

    name: str
    unit: str
    ranks: set[int] = field(default_factory=set)
    attempts: set[int] = field(default_factory=set)
    points: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON data for the API."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ranks": sorted(self.ranks),
            "attempts": sorted(self.attempts),
            "points": self.points,
        }


def metric_names_of_runs(ids: Collection[int]) -> set[str]:
    """Names of all metrics of these runs; one query."""
    rows = Cursor.objects.filter(run__in=ids, stream="points").values_list("latest", flat=True)
    return {name for latest in rows.iterator(chunk_size=200) for name in json.loads(latest)}


def series_index(*, run: Run) -> list[SeriesEntry]:
    """All metrics of the run, sorted by name; three queries."""
    entries: dict[str, SeriesEntry] = {}
    writers = Cursor.objects.filter(run=run, stream="points").values_list(
        "attempt", "rank", "latest"
    )
    for attempt, rank, latest in writers:
        for name in json.loads(latest):
            entry = entries.setdefault(name, SeriesEntry(name, run_metric_unit(name, run.spec)))
            entry.ranks.add(rank)
            entry.attempts.add(attempt)
    in_chunks = (
        Series.objects.filter(run=run).order_by().values_list("name").annotate(Sum("points"))
    )
    for name, points in in_chunks:
        if name in entries:
            entries[name].points += points
    for data in Tail.objects.filter(cursor__run=run).values_list("data", flat=True):
        block = unpack_block(data)
        for name, count in zip(
            block.names, (~missing(block.values)).sum(axis=1).tolist(), strict=True
        ):
            if name in entries:
                entries[name].points += count
    return [entries[name] for name in sorted(entries)]
