"""The newest of what a run told: each rank's last numbers, and its last log lines, found from the
end.

Knows nothing of how pages show them; who may look is decided by the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor, LogChunk
from orchestrator.telemetry.reading.logs import LogLine

_FETCH = 64  # chunks a query


def latest_by_rank(*, run: Run) -> dict[int, dict[str, float]]:
    """`{rank: {metric: newest value}}` of the newest attempt that logged points, in one query."""
    rows = Cursor.objects.filter(run=run, stream="points").order_by("-attempt", "rank")
    found: dict[int, dict[str, float]] = {}
    newest = None
    for attempt, rank, text in rows.values_list("attempt", "rank", "latest"):
        if newest is not None and attempt != newest:
            break
        found[rank], newest = (
            {name: float(value) for name, (_, value) in json.loads(text).items()},
            attempt,
        )
    return found


def latest(*, run: Run) -> dict[str, float]:
    """`{metric: newest value}` of the newest attempt that has it, its lowest rank first."""
    found: dict[str, float] = {}
    rows = Cursor.objects.filter(run=run, stream="points").order_by("-attempt", "rank")
    for text in rows.values_list("latest", flat=True):
        for name, (_, value) in json.loads(text).items():
            found.setdefault(name, float(value))
    return found


def progress_of(*, run_ids: Iterable[int]) -> dict[int, dict[str, float]]:
    """`{run: {step, time}}`: how far each run's newest attempt is, and since when (Unix seconds).

    One query.
    """
    found: dict[int, tuple[int, dict[str, float]]] = {}
    rows = Cursor.objects.filter(run_id__in=list(run_ids), stream="points")
    for run_id, attempt, step, time in rows.values_list(
        "run_id", "attempt", "last_step", "last_time"
    ):
        before = found.get(run_id)
        if before is None or (attempt, step) > (before[0], before[1]["step"]):
            found[run_id] = (attempt, {"step": step, "time": time})
    return {run_id: numbers for run_id, (_, numbers) in found.items()}


def memory_by_rank(*, run: Run) -> dict[int, dict[str, float]]:
    """`{rank: {params, grads, ...: bytes}}`, the newest of the newest attempt; ranks that told none
    are left out.
    """
    found = {}
    for rank, values in latest_by_rank(run=run).items():
        memory = {
            name.removeprefix("memory/").removesuffix("_bytes"): value
            for name, value in values.items()
            if name.startswith("memory/")
        }
        if memory:
            found[rank] = memory
    return found


def logs_newest(
    *, run: Run, rank: int | None = None, q: str | None = None, limit: int = 200
) -> list[LogLine]:
    """The last `limit` lines that match, in order of arrival; reads no more chunks than they lie
    in.
    """
    rows = LogChunk.objects.filter(run=run)
    if rank is not None:
        rows = rows.filter(rank=rank)
    if q:
        rows = rows.filter(text__icontains=q)
    wanted = (q or "").casefold()
    found: list[LogLine] = []
    below: int | None = None
    while len(found) < limit:
        batch = list(
            (rows if below is None else rows.filter(id__lt=below)).order_by("-id")[:_FETCH]
        )
        for row in batch:
            for number, text in reversed(list(enumerate(row.text.split("\n")))):
                if wanted not in text.casefold():
                    continue
                seq, cursor = row.first_seq + number, f"{row.id}.{number}"
                found.append(LogLine(row.attempt, row.rank, seq, row.time, text, cursor))
        if len(batch) < _FETCH:
            break
        below = batch[-1].id
    return found[:limit][::-1]
