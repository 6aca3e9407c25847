"""The newest of what a run told: each rank's last numbers, and its last log lines, found from the end.

Knows nothing of how pages show them; who may look is decided by the caller.
"""

from __future__ import annotations

import json

from orchestrator.runs.models import Run
from orchestrator.telemetry.logs import LogLine
from orchestrator.telemetry.models import Cursor, LogChunk

_FETCH = 64  # chunks a query


def latest_by_rank(*, run: Run) -> dict[int, dict[str, float]]:
    """`{rank: {metric: newest value}}` of the newest attempt that logged points, in one query."""
    rows = Cursor.objects.filter(run=run, stream="points").order_by("-attempt", "rank")
    found: dict[int, dict[str, float]] = {}
    newest = None
    for attempt, rank, text in rows.values_list("attempt", "rank", "latest"):
        if newest is not None and attempt != newest:
            break
        found[rank], newest = {name: float(value) for name, (_, value) in json.loads(text).items()}, attempt
    return found


def logs_newest(*, run: Run, rank: int | None = None, q: str | None = None, limit: int = 200) -> list[LogLine]:
    """The last `limit` lines that match, in order of arrival; reads no more chunks than they lie in."""
    rows = LogChunk.objects.filter(run=run)
    if rank is not None:
        rows = rows.filter(rank=rank)
    if q:
        rows = rows.filter(text__icontains=q)
    wanted = (q or "").casefold()
    found: list[LogLine] = []
    below: int | None = None
    while len(found) < limit:
        batch = list((rows if below is None else rows.filter(id__lt=below)).order_by("-id")[:_FETCH])
        for row in batch:
            for number, text in reversed(list(enumerate(row.text.split("\n")))):
                if wanted not in text.casefold():
                    continue
                found.append(LogLine(row.attempt, row.rank, row.first_seq + number, row.time, text, f"{row.id}.{number}"))
        if len(batch) < _FETCH:
            break
        below = batch[-1].id
    return found[:limit][::-1]
