"""The data of a block `runs`: a table of runs with columns of metrics and configuration."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from orchestrator.common.errors import invalid
from orchestrator.common.units import is_id, iso
from orchestrator.reports.readers import Readers
from orchestrator.run_table import selectors as run_table
from orchestrator.run_table.export import run_value
from orchestrator.run_table.selectors import Column

FIELDS: Final = ("title", "runs", "query", "columns", "sort", "limit")
MOST_ROWS: Final = 100
_USUAL_ROWS: Final = 20
_MOST_COLUMNS: Final = 20


def check_table(body: dict[str, Any]) -> None:
    """Raises 422 for a field that does not exist or has a wrong type."""
    for name in body:
        if name not in FIELDS:
            raise invalid("text", f"a run table has no field {name!r}", ", ".join(FIELDS))
    for name in ("title", "query", "sort"):
        if not isinstance(body.get(name, ""), str):
            raise invalid("text", f"{name} of a run table is not text", f'Use {name}: "…".')
    _limit(body)
    _listed(body, "columns")
    _ids(body)


def read_table(body: dict[str, Any], readers: Readers) -> dict[str, Any]:
    """`{title, columns, rows: [{run, name, state, cells}], more, unknown}` as JSON data.

    Only runs that all readers see are listed. Raises Refusal for a query that cannot be read.
    """
    check_table(body)
    names = run_table.known_names(user=readers.first)
    wanted = _listed(body, "columns")[:_MOST_COLUMNS]
    columns, unknown = run_table.read_columns(",".join(wanted), names)
    visible = readers.visible_runs()
    if ids := _ids(body):
        visible = visible.filter(pk__in=ids)
    matching = run_table.matching(
        user=readers.first, query=str(body.get("query", "")), names=names, within=visible
    )
    limit = _limit(body)
    sort = run_table.read_sort(str(body.get("sort", "")), names)
    listed = [id for id, _ in run_table.table_ids(runs=matching, sort=sort, limit=limit + 1)]
    if ids and sort is None:  # in the order of the text
        listed.sort(key=ids.index)
    values = run_table.column_values(listed[:limit], columns)
    return {
        "title": str(body.get("title", "")),
        "columns": [{"key": column.key, "type": column.type} for column in columns],
        "rows": [
            {
                "run": run.pk,
                "name": run.name,
                "state": run.state,
                "cells": [_cell(run, column, values[run.pk]) for column in columns],
            }
            for run in run_table.run_page(listed[:limit])
        ],
        "more": len(listed) > limit,
        "unknown": unknown,
    }


def table_block(ids: Sequence[str]) -> str:
    """The Markdown of a table of these runs; empty without runs."""
    if not ids:
        return ""
    return f"```runs\nruns: {', '.join(ids)}\ncolumns: model, loss, val_loss\n```\n"


def _cell(run: Any, column: Column, values: dict[str, float | str]) -> Any:
    if column.source != "run":
        return values.get(column.key)
    value = run_value(run, column.name)
    return iso(value) if isinstance(value, datetime) else value


def _limit(body: dict[str, Any]) -> int:
    limit = body.get("limit", _USUAL_ROWS)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_ROWS:
        raise invalid("text", f"limit {limit!r} is not a number of rows", f"Use 1 to {MOST_ROWS}.")
    return limit


def _listed(body: dict[str, Any], name: str) -> list[str]:
    """A field that is a list, or a text with commas."""
    value = body.get(name) or []
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, int) and not isinstance(parts, bool):
        parts = [parts]
    if not isinstance(parts, list) or any(isinstance(part, list | dict) for part in parts):
        raise invalid("text", f"{name} of a run table is not a list", f"Use {name}: a, b.")
    return [str(part).strip() for part in parts if str(part).strip()]


def _ids(body: dict[str, Any]) -> list[int]:
    ids = _listed(body, "runs")
    for text in ids:
        if not is_id(text):
            raise invalid("text", f"{text[:40]!r} is not a run's number", "Use runs: 12, 14.")
    if len(ids) > MOST_ROWS:
        raise invalid("text", f"the table lists {len(ids)} runs", f"Use at most {MOST_ROWS}.")
    return [int(text) for text in dict.fromkeys(ids)]
