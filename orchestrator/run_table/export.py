"""The runs table as CSV or Parquet: every row of a view, with its columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.db.models import Max

from orchestrator.common.units import csv_text, iso
from orchestrator.run_table.columns import Column
from orchestrator.run_table.order import MatchingRuns, PageEnd, Sort, sorted_ids
from orchestrator.run_table.parquet import Kind, ParquetColumn, parquet_file
from orchestrator.run_table.selectors import column_values, run_page
from orchestrator.runs.models import Run, RunParameter

_BATCH: Final = 500
_ROW_GROUP: Final = 10_000
_FIRST: Final = ("id", "name", "state", "kind", "model", "owner", "experiment", "tags", "created")
_KINDS: Final[dict[str, Kind]] = {
    "id": "integer",
    "devices": "integer",
    "priority": "integer",
    "attempt": "integer",
    "created": "time",
    "started": "time",
    "ended": "time",
    "age": "time",
    "duration": "number",
}


def table_csv(
    runs: MatchingRuns, *, sort: Sort | None, columns: Sequence[Column]
) -> Iterator[bytes]:
    """Lines of UTF-8 text, some hundreds at a time; the first line names the columns."""
    more = _further(columns)
    head = _lines([[*_FIRST, *(column.key for column in more)]])
    for rows in _batches(runs, sort, more):  # before the first part, so that it can be refused
        yield head + _lines([[_csv_cell(cell) for cell in row] for row in rows])
        head = b""
    if head:
        yield head


def table_parquet(
    runs: MatchingRuns, *, sort: Sort | None, columns: Sequence[Column]
) -> Iterator[bytes]:
    """A Parquet file, in parts of 10,000 rows. Times are UTC; durations are in seconds.

    A value of specs is a number if all of these runs have a number there, else text. A text that
    replaces such a number while the table is written is left out.
    """
    # the types of columns are determined first, so runs that are submitted later are left out
    highest = Run.objects.aggregate(highest=Max("pk"))["highest"] or 0
    runs = MatchingRuns(runs.runs.filter(pk__lte=highest), runs.near.filter(pk__lte=highest))
    more = list({column.key: column for column in _further(columns)}.values())
    schema = [ParquetColumn(name, _KINDS.get(name, "text")) for name in _FIRST]
    schema += [ParquetColumn(column.key, _kind(column, runs)) for column in more]
    return parquet_file(schema, _row_groups(_batches(runs, sort, more), schema))


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


def _further(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if column.key not in _FIRST and column.name != "tag"]


def _batches(
    runs: MatchingRuns, sort: Sort | None, more: Sequence[Column]
) -> Iterator[list[list[Any]]]:
    """The rows in order, some hundreds at a time."""
    after: PageEnd | None = None
    while rows := sorted_ids(runs, sort, after=after, limit=_BATCH):
        ids = [id for id, _ in rows]
        values = column_values(ids, more)
        yield [_row(run, more, values[run.pk]) for run in run_page(ids)]
        if len(rows) < _BATCH:
            return
        after = rows[-1][1]


def _row(run: Run, more: Sequence[Column], values: dict[str, float | str]) -> list[Any]:
    cells = [run_value(run, name) for name in _FIRST]
    return cells + [
        run_value(run, column.name) if column.source == "run" else values.get(column.key)
        for column in more
    ]


def _csv_cell(cell: Any) -> Any:
    return iso(cell) if hasattr(cell, "isoformat") else cell


def _kind(column: Column, runs: MatchingRuns) -> Kind:
    if column.source == "run":
        return _KINDS.get(column.name, "text")
    if column.source == "metric":
        return "number"
    texts = RunParameter.objects.filter(name=column.name, number__isnull=True)
    return "text" if texts.filter(run__in=runs.runs.order_by().values("pk")).exists() else "number"


def _row_groups(
    batches: Iterator[list[list[Any]]], schema: Sequence[ParquetColumn]
) -> Iterator[list[list[Any]]]:
    texts = [number for number, column in enumerate(schema) if column.kind == "text"]
    numbers = [number for number, column in enumerate(schema) if column.kind == "number"]
    group: list[list[Any]] = []
    for rows in batches:
        for row in rows:
            for number in texts:
                row[number] = _text(row[number])
            for number in numbers:
                if not isinstance(row[number], int | float):  # replaced after its type was read
                    row[number] = None
        group += rows
        if len(group) >= _ROW_GROUP:
            yield group
            group = []
    if group:
        yield group


def _text(cell: Any) -> str | None:
    """64, not 64.0, next to `auto`."""
    whole = isinstance(cell, float) and cell.is_integer()
    return None if cell is None else str(int(cell) if whole else cell)


def _lines(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [csv_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return text.getvalue().encode()
