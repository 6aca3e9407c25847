"""Log lines: stored as numbered chunks a rank, read by rank, after a number, and by a text they
contain.

Does not fold equal lines of several ranks; each line carries its rank so that a page can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import LogChunk

_FETCH = 64  # chunks a query


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `cursor` names its place among the run's lines, to ask for what follows it."""

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
    """Up to `limit` lines in order of arrival, those that contain `q` (without regard to case);
    `after` is a `cursor`.

    ValueError when `after` is not one.
    """
    found: list[LogLine] = []
    for line in _lines(run, rank, q or "", *_place(after)):
        found.append(line)
        if len(found) == limit:
            break
    return found


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


def _place(after: str | None) -> tuple[int, int]:
    """`(chunk id, line within it)`; lines up to and with it are skipped."""
    if not after:
        return 0, -1
    chunk, _, line = after.partition(".")
    if not (chunk.isdigit() and line.isdigit()):
        raise ValueError(
            f"after={after!r} is not a place in the logs; use the cursor of the last line you have."
        )
    return int(chunk), int(line)
