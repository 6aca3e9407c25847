"""Cursors of many writers, read and written back in a few statements per tick.

Does not decide which points are new; `points` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from django.db import connection

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.packing.ranges import Ranges


class Writer(NamedTuple):
    """The rank that numbered the data; locks are taken in ascending order."""

    run_id: int
    attempt: int
    rank: int


# one prepared statement for all rows: Django's bulk_update builds a CASE of every field and row
_UPDATE = (
    "UPDATE telemetry_cursor SET ranges = %s, latest = %s, last_seq = %s, last_step = %s, "
    "last_time = %s, tail_points = %s WHERE id = %s"
)


def lock_runs(run_ids: Collection[int]) -> dict[int, Run]:
    """Lock the runs that exist, by ascending id, until the transaction ends.

    All rows that a tick writes belong to these runs, so this lock alone serializes two ingest
    processes.
    """
    rows = Run.objects.select_for_update(no_key=True).filter(id__in=run_ids).order_by("id")
    return {row.id: row for row in rows}


def get_cursors(writers: Collection[Writer], stream: str) -> dict[Writer, Cursor]:
    """Get or create the writers' cursors. The runs must be locked."""
    if not writers:
        return {}
    cursors = _existing(writers, stream)
    new = [
        Cursor(run_id=writer.run_id, attempt=writer.attempt, rank=writer.rank, stream=stream)
        for writer in sorted(set(writers) - cursors.keys())
    ]
    for cursor in Cursor.objects.bulk_create(new):
        cursors[Writer(cursor.run_id, cursor.attempt, cursor.rank)] = cursor
    return cursors


def cursors_save(cursors: Collection[Cursor]) -> None:
    """Write all fields that a tick changes."""
    if not cursors:
        return
    rows: list[tuple[Any, ...]] = [
        (
            row.ranges,
            row.latest,
            row.last_seq,
            row.last_step,
            row.last_time,
            row.tail_points,
            row.id,
        )
        for row in cursors
    ]
    with connection.cursor() as sql:
        sql.executemany(_UPDATE, rows)


def parse_ranges(cursor: Cursor) -> Ranges:
    """The cursor's number ranges."""
    ranges: Ranges = json.loads(cursor.ranges)
    return ranges


def _existing(writers: Collection[Writer], stream: str) -> dict[Writer, Cursor]:
    wanted = set(writers)
    rows = Cursor.objects.filter(
        stream=stream,
        run_id__in={writer.run_id for writer in wanted},
        attempt__in={writer.attempt for writer in wanted},
    )
    cursors = {Writer(row.run_id, row.attempt, row.rank): row for row in rows}
    return {writer: row for writer, row in cursors.items() if writer in wanted}
