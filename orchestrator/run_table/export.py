"""The runs table as CSV: every row of a view, with its columns.

Parquet is not offered: its only writers for Python are 40 MB and larger. `pandas.read_csv` and
DuckDB read this file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

from orchestrator.common.units import csv_text, iso
from orchestrator.run_table.columns import Column
from orchestrator.run_table.order import MatchingRuns, PageEnd, Sort, sorted_ids
from orchestrator.run_table.selectors import column_values, run_page
from orchestrator.runs.models import Run

_BATCH: Final = 500
_FIRST: Final = ("id", "name", "state", "kind", "model", "owner", "experiment", "tags", "created")


def table_csv(
    runs: MatchingRuns, *, sort: Sort | None, columns: Sequence[Column]
) -> Iterator[bytes]:
    """Lines of UTF-8 text, some hundred at a time; the first line names the columns."""
    more = [column for column in columns if column.key not in _FIRST and column.name != "tag"]
    yield _lines([[*_FIRST, *(column.key for column in more)]])
    after: PageEnd | None = None
    while rows := sorted_ids(runs, sort, after=after, limit=_BATCH):
        ids = [id for id, _ in rows]
        values = column_values(ids, more)
        yield _lines([_row(run, more, values[run.pk]) for run in run_page(ids)])
        if len(rows) < _BATCH:
            return
        after = rows[-1][1]


def run_value(run: Run, name: str) -> Any:
    """The value of a column of a run (`columns.RUN_COLUMNS`); durations in seconds."""
    match name:
        case "id":
            return run.pk
        case "model":
            return run.model_name
        case "owner":
            return run.owner.username
        case "experiment":
            return run.experiment.name if run.experiment else None
        case "tag" | "tags":
            return " ".join(sorted(tag.name for tag in run.tags.all()))
        case "pool":
            return run.pool_name
        case "attempt":
            return run.attempt_number
        case "exit":
            return (run.exit or {}).get("class")
        case "duration":
            ended = run.ended and run.started and (run.ended - run.started).total_seconds()
            return ended if run.ended else None
        case "age":
            return run.created
    return getattr(run, name)


def _row(run: Run, more: Sequence[Column], values: dict[str, float | str]) -> list[Any]:
    cells = [run_value(run, name) for name in _FIRST]
    cells += [
        run_value(run, column.name) if column.source == "run" else values.get(column.key)
        for column in more
    ]
    return [iso(cell) if hasattr(cell, "isoformat") else cell for cell in cells]


def _lines(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [csv_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return text.getvalue().encode()
