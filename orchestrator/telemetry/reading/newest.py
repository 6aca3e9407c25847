"""Reads each rank's newest values, and the last log lines of a run.

Does not check permissions; callers do.
"""

from __future__ import annotations

import json

from django.db.models import QuerySet

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor, LogChunk
from orchestrator.telemetry.reading.logs import LogLine

_FETCH = 64  # chunks per query


def latest_by_rank(*, run: Run) -> dict[int, dict[str, float]]:
    """`{rank: {metric: newest value}}` of the newest attempt that logged points, in one query."""
    rows = Cursor.objects.filter(run=run, stream="points").order_by("-attempt", "rank")
    by_rank: dict[int, dict[str, float]] = {}
    newest = None
    for attempt, rank, text in rows.values_list("attempt", "rank", "latest"):
        if newest is not None and attempt != newest:
            break
        by_rank[rank] = {name: float(value) for name, (_, value) in json.loads(text).items()}
        newest = attempt
    return by_rank


def latest(*, run: Run) -> dict[str, float]:
    """`{metric: newest value}` of the newest attempt that has it, its lowest rank first."""
    values: dict[str, float] = {}
    rows = Cursor.objects.filter(run=run, stream="points").order_by("-attempt", "rank")
    for text in rows.values_list("latest", flat=True):
        for name, (_, value) in json.loads(text).items():
            values.setdefault(name, float(value))
    return values


def latest_of(*, runs: QuerySet[Run]) -> dict[int, dict[str, float]]:
    """`latest` of the runs of a query, in one query."""
    values: dict[int, dict[str, float]] = {}
    rows = Cursor.objects.filter(run__in=runs.order_by().values("pk"), stream="points")
    rows = rows.order_by("-attempt", "rank")
    for run, text in rows.values_list("run_id", "latest"):
        own = values.setdefault(run, {})
        for name, (_, value) in json.loads(text).items():
            own.setdefault(name, float(value))
    return values


def memory_by_rank(*, run: Run) -> dict[int, dict[str, float]]:
    """`{rank: {params, grads, ...: bytes}}`, newest values of the newest attempt."""
    by_rank = {}
    for rank, values in latest_by_rank(run=run).items():
        memory = {
            name.removeprefix("memory/").removesuffix("_bytes"): value
            for name, value in values.items()
            if name.startswith("memory/")
        }
        if memory:
            by_rank[rank] = memory
    return by_rank


def logs_newest(
    *, run: Run, rank: int | None = None, q: str | None = None, limit: int = 200
) -> list[LogLine]:
    """The last `limit` lines that contain `q`, ignoring case, in order of arrival."""
    rows = LogChunk.objects.filter(run=run)
    if rank is not None:
        rows = rows.filter(rank=rank)
    if q:
        rows = rows.filter(text__icontains=q)
    wanted = (q or "").casefold()
    lines: list[LogLine] = []
    below: int | None = None
    while len(lines) < limit:
        batch = list(
            (rows if below is None else rows.filter(id__lt=below)).order_by("-id")[:_FETCH]
        )
        for row in batch:
            for number, text in reversed(list(enumerate(row.text.split("\n")))):
                if wanted not in text.casefold():
                    continue
                seq, cursor = row.first_seq + number, f"{row.id}.{number}"
                lines.append(LogLine(row.attempt, row.rank, seq, row.time, text, cursor))
        if len(batch) < _FETCH:
            break
        below = batch[-1].id
    return lines[:limit][::-1]
