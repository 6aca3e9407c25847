"""Reads log lines by rank, after a cursor, and by contained text.

Does not group equal lines of several ranks; pages do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import LogChunk

_FETCH = 64  # chunks per query


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `cursor` is its place among the run's lines, for reading the lines after it."""

    attempt: int
    rank: int  # -1: the supervisor
    seq: int
    time: datetime
    text: str
    cursor: str


def logs(
    *,
    run: Run,
    rank: int | None = None,
    q: str | None = None,
    after: str | None = None,
    limit: int = 200,
) -> list[LogLine]:
    """Up to `limit` lines in order of arrival that contain `q`, ignoring case.

    `after` is a line's `cursor`; raises ValueError if it is not one.
    """
    result: list[LogLine] = []
    for line in _lines(run, rank, q or "", *_parse_cursor(after)):
        result.append(line)
        if len(result) == limit:
            break
    return result


def _lines(run: Run, rank: int | None, q: str, chunk: int, skip: int) -> Iterator[LogLine]:
    rows = LogChunk.objects.filter(run=run)
    if rank is not None:
        rows = rows.filter(rank=rank)
    if q:
        rows = rows.filter(text__icontains=q)
    wanted = q.casefold()
    start = chunk
    while True:
        batch = list(rows.filter(id__gte=start).order_by("id")[:_FETCH])
        for row in batch:
            for number, text in enumerate(row.text.split("\n")):
                if (row.id == chunk and number <= skip) or (
                    wanted and wanted not in text.casefold()
                ):
                    continue
                yield LogLine(
                    row.attempt,
                    row.rank,
                    row.first_seq + number,
                    row.time,
                    text,
                    f"{row.id}.{number}",
                )
        if len(batch) < _FETCH:
            return
        start = batch[-1].id + 1


def _parse_cursor(after: str | None) -> tuple[int, int]:
    """`(chunk id, line within it)` of the last line to skip."""
    if not after:
        return 0, -1
    chunk, _, line = after.partition(".")
    if not (chunk.isdigit() and line.isdigit()):
        raise ValueError(
            f"after={after!r} is not a log cursor; use the cursor of the last line that you read."
        )
    return int(chunk), int(line)
