"""Columns of the runs page: their titles, their order, and the cells of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.run_table.export import run_value
from orchestrator.run_table.selectors import Column, ColumnNames, Sort, read_columns
from webui.forms.run_filters import RunFilters
from webui.presentation import formatting

# columns that the page draws itself: title, what they sort by
DRAWN: Final = {
    "experiment": (gettext_noop("Experiment"), "experiment"),
    "owner": (gettext_noop("Owner"), "owner"),
    "model": (gettext_noop("Model"), "model"),
    "plan": (gettext_noop("Plan"), ""),
    "result": (gettext_noop("Result"), "loss"),
    "efficiency": (gettext_noop("MFU"), "median(mfu)"),
    "tokens": (gettext_noop("Tokens"), ""),
    "device_hours": (gettext_noop("Device-hours"), ""),
    "age": (gettext_noop("Age"), "age"),
}
# columns that show and sort by another value than the newest one
_SORTED_BY: Final = {"efficiency": gettext_noop("Median over all steps")}
_METRICS: Final = {"loss": "loss", "median(mfu)": "mfu"}
_NUMBERS: Final = frozenset(("efficiency", "tokens", "device_hours", "age"))
_MOST: Final = 40  # columns of a view
_SPARK: Final = "curve("


@dataclass(frozen=True, slots=True)
class ColumnHead:
    """A column's head: `url` sorts by it, `order` is ascending or descending if it does now.

    `hint` names the value that it shows and sorts by, if that is not the newest.
    """

    key: str
    title: str
    kind: str  # of DRAWN: its key; else value or curve
    number: bool
    url: str = ""
    order: str = ""
    pinned: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of one request; `unknown` are entries that no run has."""

    heads: list[ColumnHead]
    columns: dict[str, Column]
    curves: dict[str, str]  # key → metric
    unknown: list[str]


def table_columns(filters: RunFilters, names: ColumnNames, sort: Sort | None) -> TableColumns:
    """Read the columns of the URL; the usual ones without any."""
    wanted = [part.strip() for part in filters.columns.split(",") if part.strip()] or list(DRAWN)
    pinned = {part.strip() for part in filters.pin.split(",")}
    heads, columns, curves, unknown = list[ColumnHead](), dict[str, Column](), dict[str, str](), []
    for key in dict.fromkeys(wanted[:_MOST]):
        if key in DRAWN:
            title, by = DRAWN[key]
            url, order = _sorting(filters, by, sort, names)
            hint = _(_SORTED_BY[key]) if key in _SORTED_BY else ""
            number, is_pinned = key in _NUMBERS, key in pinned
            heads.append(ColumnHead(key, _(title), key, number, url, order, is_pinned, hint))
        elif key.startswith(_SPARK) and key[len(_SPARK) : -1] in names.metrics:
            curves[key] = key[len(_SPARK) : -1]
            heads.append(ColumnHead(key, curves[key], "curve", False, pinned=key in pinned))
        else:
            read, missing = read_columns(key, names)
            unknown += missing
            for column in read:
                columns[column.key] = column
                number = column.source == "metric" or column.type in ("number", "duration", "any")
                url, order = _sorting(filters, column.key, sort, names)
                heads.append(
                    ColumnHead(column.key, column.key, "value", number, url, order, key in pinned)
                )
    return TableColumns(heads, columns, curves, unknown)


def cells(
    run: Any,
    table: TableColumns,
    values: Mapping[str, float | str],
    sparks: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    """The cells of a row, one per head."""
    return [
        {"head": head, "spark": ",".join(f"{y:.5g}" for y in sparks.get(head.key, ()))}
        | _text(run, table.columns.get(head.key), values.get(head.key))
        for head in table.heads
    ]


def _text(run: Any, column: Column | None, value: float | str | None) -> dict[str, Any]:
    if column is None:
        return {}
    if column.source == "run":
        value = run_value(run, column.name)
        if column.type == "duration":
            return {"text": formatting.duration(value) if value is not None else ""}
        if hasattr(value, "isoformat"):
            return {"time": value}
    if isinstance(value, float | int) and not isinstance(value, bool):
        exact = str(value) if isinstance(value, int) else f"{value:.6g}"
        plain = column.source == "config" or 0 < abs(value) < 1e-3
        return {"text": exact if plain else formatting.quantity(value, 4), "title": exact}
    return {"text": "" if value is None else str(value)}


def _sorting(
    filters: RunFilters, by: str, sort: Sort | None, names: ColumnNames
) -> tuple[str, str]:
    """The URL that sorts by a column, or turns its order; and the present order."""
    if not by or (by in _METRICS and _METRICS[by] not in names.metrics) or by == "tag":
        return "", ""
    if by in ("notes", "exit", "duration"):
        return "", ""
    present = sort is not None and sort.column.key == by
    if present and sort is not None and not sort.descending:
        return filters.url(sort=f"-{by}"), "ascending"
    return filters.url(sort=by), "descending" if present else ""
