"""Pages of runs in the order of any column: keyset over an index, runs without a value last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q, QuerySet

from orchestrator.common.errors import invalid
from orchestrator.run_table.columns import UNSORTABLE, Column
from orchestrator.run_table.conditions import FIELDS
from orchestrator.runs.models import Run, RunParameter
from orchestrator.telemetry.models import MetricSummary

_NUMBER, _TEXT, _NONE = "number", "text", "none"  # phases of an order


@dataclass(frozen=True, slots=True)
class Sort:
    """A column and its direction; written `-min(val_loss)` for descending."""

    column: Column
    descending: bool = False

    @property
    def key(self) -> str:
        """The order as it is written."""
        return f"-{self.column.key}" if self.descending else self.column.key


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page ended: the phase, the value and id of its last row."""

    phase: str
    value: float | str | None
    id: int


def read_place(text: str) -> Place | None:
    """The place of a cursor; None for an empty or wrong one."""
    try:
        phase, value, id = json.loads(text)
    except (ValueError, TypeError):
        return None
    right = {_NUMBER: (int, float), _TEXT: (str,), _NONE: (type(None),)}.get(phase)
    if right is None or not isinstance(value, right) or isinstance(value, bool):
        return None
    if isinstance(id, bool) or not isinstance(id, int) or abs(id) >= 2**63:
        return None
    return Place(phase, value, id)


def write_place(place: Place) -> str:
    """The cursor of a place."""
    return json.dumps([place.phase, place.value, place.id], separators=(",", ":"))


def sorted_ids(
    runs: QuerySet[Run], sort: Sort | None, *, after: Place | None, limit: int, unfiltered: bool
) -> list[tuple[int, Place]]:
    """At most `limit` ids with their places, after a place.

    `unfiltered`: `runs` are all runs, so their ids need no test. Raises Refusal for a column
    without an order.
    """
    if sort is None:
        rows = runs.order_by("-pk")
        if after is not None:
            rows = rows.filter(pk__lt=after.id)
        return [(pk, Place(_NONE, None, pk)) for pk in rows.values_list("pk", flat=True)[:limit]]
    column = sort.column
    if column.source == "run" and column.name in UNSORTABLE:
        hint = "for example created, name or val_loss"
        raise invalid("sort", f"runs cannot be sorted by {column.name}", hint)
    phases = (*_value_phases(column), _NONE)
    first = phases.index(after.phase) if after is not None and after.phase in phases else 0
    found: list[tuple[int, Place]] = []
    for phase in phases[first:]:
        start = after if after is not None and after.phase == phase else None
        room = limit - len(found)
        if room <= 0:
            break
        if phase == _NONE:
            found += _without_value(runs, column, start, room)
        else:
            found += _with_value(runs, sort, phase, start, room, unfiltered)
    return found


def _value_phases(column: Column) -> tuple[str, ...]:
    """Numbers come first, then texts."""
    if column.source == "config":
        return (_NUMBER, _TEXT)
    return (_NUMBER,) if column.source == "metric" or column.type == "number" else (_TEXT,)


def _with_value(
    runs: QuerySet[Run], sort: Sort, phase: str, after: Place | None, limit: int, unfiltered: bool
) -> list[tuple[int, Place]]:
    rows, field, id, descending = _rows(runs, sort, phase)
    if sort.column.source != "run" and not unfiltered:
        rows = rows.filter(run_id__in=runs.order_by().values("pk"))
    if after is not None:
        value = after.value
        if sort.column.type in ("time", "duration"):
            value = _moment(str(value))  # type: ignore[assignment]
        beyond = "lt" if descending else "gt"
        # a row comparison, which an index answers: `field >= value` and not before its id
        rows = rows.filter(
            Q(**{f"{field}__{beyond}e": value})
            & ~(Q(**{field: value}) & ~Q(**{f"{id}__{beyond}": after.id}))
        )
    sign = "-" if descending else ""
    ordered = rows.order_by(f"{sign}{field}", f"{sign}{id}").values_list(id, field)[:limit]
    return [(pk, Place(phase, _plain(value), pk)) for pk, value in ordered]


def _rows(runs: QuerySet[Run], sort: Sort, phase: str) -> tuple[QuerySet[Any], str, str, bool]:
    """Rows with a value, the fields of value and run, and whether they descend."""
    column = sort.column
    if column.source == "metric":
        rows: QuerySet[Any] = MetricSummary.objects.filter(name=column.name)
        field = column.aggregate
        return rows.filter(**{f"{field}__isnull": False}), field, "run_id", sort.descending
    if column.source == "config":
        parameters = RunParameter.objects.filter(name=column.name, number__isnull=phase == _TEXT)
        return parameters, phase, "run_id", sort.descending
    if column.name == "age":  # the youngest was created last
        return runs, "created", "pk", not sort.descending
    field = FIELDS[column.name]
    return runs.filter(**{f"{field}__isnull": False}), field, "pk", sort.descending


def _without_value(
    runs: QuerySet[Run], column: Column, after: Place | None, limit: int
) -> list[tuple[int, Place]]:
    if column.source == "metric":
        valued = MetricSummary.objects.filter(name=column.name)
        rest = runs.exclude(
            pk__in=valued.filter(**{f"{column.aggregate}__isnull": False}).values("run_id")
        )
    elif column.source == "config":
        rest = runs.exclude(pk__in=RunParameter.objects.filter(name=column.name).values("run_id"))
    elif column.name in ("started", "ended", "experiment"):
        rest = runs.filter(**{f"{FIELDS[column.name]}__isnull": True})
    else:
        return []
    if after is not None:
        rest = rest.filter(pk__lt=after.id)
    ids = rest.order_by("-pk").values_list("pk", flat=True)[:limit]
    return [(pk, Place(_NONE, None, pk)) for pk in ids]


def _plain(value: Any) -> float | str | None:
    return value.isoformat() if isinstance(value, datetime) else value


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC)
