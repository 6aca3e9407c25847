"""Pages of runs in the order of any column: keyset over an index, runs without a value last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from django.db.models import Exists, Max, OuterRef, Q, QuerySet

from orchestrator.common.errors import invalid
from orchestrator.run_table.columns import UNSORTABLE, Column
from orchestrator.run_table.conditions import FIELDS
from orchestrator.runs.models import Run, RunParameter
from orchestrator.telemetry.models import MetricSummary

_NUMBER, _TEXT, _NONE = "number", "text", "none"  # phases of an order
_WINDOW: Final = 4000  # ids below the last one of a page that are tested one by one
_WALK: Final = (1000, 4000)  # rows of an index that are tested, after twice those of a page
_INDEXED: Final = frozenset(("id", "name", "model", "created", "age", "started", "ended"))


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
class PageEnd:
    """Where a page ended: the phase, the value and id of its last row."""

    phase: str
    value: float | str | None
    id: int


def read_place(text: str) -> PageEnd | None:
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
    return PageEnd(phase, value, id)


def write_place(place: PageEnd) -> str:
    """The cursor of a place."""
    return json.dumps([place.phase, place.value, place.id], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class MatchingRuns:
    """Runs that pass filters and a query, in both forms of conditions."""

    runs: QuerySet[Run]  # fast if few match
    near: QuerySet[Run]  # fast for few runs


def sorted_ids(
    matching: MatchingRuns, sort: Sort | None, *, after: PageEnd | None, limit: int
) -> list[tuple[int, PageEnd]]:
    """At most `limit` ids with their places, after a place.

    Raises Refusal for a column without an order.
    """
    if sort is None:
        return _newest(matching, after, limit)
    column = sort.column
    if column.source == "run" and column.name in UNSORTABLE:
        hint = "Use for example created, name or val_loss."
        raise invalid("sort", f"runs cannot be sorted by {column.name}", hint)
    phases = (*_value_phases(column), _NONE)
    first = phases.index(after.phase) if after is not None and after.phase in phases else 0
    rows: list[tuple[int, PageEnd]] = []
    for phase in phases[first:]:
        start = after if after is not None and after.phase == phase else None
        room = limit - len(rows)
        if room <= 0:
            break
        if phase == _NONE:
            rows += _newest(_without_value(matching, column), start, room)
        else:
            rows += _with_value(matching, sort, phase, start, room)
    return rows


def _newest(matching: MatchingRuns, after: PageEnd | None, limit: int) -> list[tuple[int, PageEnd]]:
    """By descending id: first among the next ids, then among all."""
    last = after.id if after is not None else None
    forms = [matching.runs]
    if matching.near is not matching.runs:
        last = last or _highest_id() + 1
        forms.insert(0, matching.near.filter(pk__gte=last - _WINDOW))
    ids: list[int] = []
    for runs in forms:
        rows = runs if last is None else runs.filter(pk__lt=last)
        ids = list(rows.order_by("-pk").values_list("pk", flat=True)[:limit])
        if len(ids) == limit:
            break
    return [(pk, PageEnd(_NONE, None, pk)) for pk in ids]


def _highest_id() -> int:
    return Run.objects.aggregate(highest=Max("pk"))["highest"] or 0


def _value_phases(column: Column) -> tuple[str, ...]:
    """Numbers come first, then texts."""
    if column.source == "config":
        return (_NUMBER, _TEXT)
    return (_NUMBER,) if column.source == "metric" or column.type == "number" else (_TEXT,)


def _with_value(
    matching: MatchingRuns, sort: Sort, phase: str, after: PageEnd | None, limit: int
) -> list[tuple[int, PageEnd]]:
    """Walks along the index and tests its first thousands of runs; if too few match, sorts all."""
    ordered, field, id = _ordered(sort, phase, after)
    if _has_index(sort.column):
        rows: list[tuple[int, PageEnd]] = []
        start = 0
        for size in (2 * limit, *_WALK):
            batch = list(ordered.values_list(id, field)[start : start + size])
            start += size
            passing = set(
                matching.near.order_by()
                .filter(pk__in=[pk for pk, _ in batch])
                .values_list("pk", flat=True)
            )
            rows += [
                (pk, PageEnd(phase, _plain(value), pk)) for pk, value in batch if pk in passing
            ]
            if len(rows) >= limit or len(batch) < size:
                return rows[:limit]
    chosen = ordered.filter(**{f"{id}__in": matching.runs.order_by().values("pk")})
    return [
        (pk, PageEnd(phase, _plain(value), pk))
        for pk, value in chosen.values_list(id, field)[:limit]
    ]


def _has_index(column: Column) -> bool:
    return column.source != "run" or column.name in _INDEXED


def _ordered(sort: Sort, phase: str, after: PageEnd | None) -> tuple[QuerySet[Any], str, str]:
    """All rows with a value in order, after a place; their fields of value and run."""
    column, descending = sort.column, sort.descending
    rows: QuerySet[Any]
    if column.source == "metric":
        field, id = column.aggregate, "run_id"
        rows = MetricSummary.objects.filter(name=column.name, **{f"{field}__isnull": False})
    elif column.source == "config":
        field, id = phase, "run_id"
        rows = RunParameter.objects.filter(name=column.name, number__isnull=phase == _TEXT)
    elif column.name == "age":  # the youngest was created last
        field, id, descending, rows = "created", "pk", not descending, Run.objects.all()
    else:
        field, id = FIELDS[column.name], "pk"
        rows = Run.objects.filter(**{f"{field}__isnull": False})
    if after is not None:
        value: Any = after.value
        if column.type in ("time", "duration"):
            value = _moment(str(value))
        beyond = "lt" if descending else "gt"
        # a range of the index, without its first runs
        rows = rows.filter(
            Q(**{f"{field}__{beyond}e": value})
            & ~(Q(**{field: value}) & ~Q(**{f"{id}__{beyond}": after.id}))
        )
    sign = "-" if descending else ""
    return rows.order_by(f"{sign}{field}", f"{sign}{id}"), field, id


def _without_value(matching: MatchingRuns, column: Column) -> MatchingRuns:
    if column.source == "metric":
        rows = MetricSummary.objects.filter(name=column.name)
        valued = rows.filter(**{f"{column.aggregate}__isnull": False})
        return _without_rows(matching, valued)
    if column.source == "config":
        return _without_rows(matching, RunParameter.objects.filter(name=column.name))
    if column.name in ("started", "ended", "experiment"):
        empty = {f"{FIELDS[column.name]}__isnull": True}
        return MatchingRuns(matching.runs.filter(**empty), matching.near.filter(**empty))
    return MatchingRuns(matching.runs.none(), matching.near.none())


def _without_rows(matching: MatchingRuns, rows: QuerySet[Any]) -> MatchingRuns:
    correlated = Exists(rows.filter(run_id=OuterRef("pk")))
    return MatchingRuns(
        matching.runs.exclude(pk__in=rows.values("run_id")), matching.near.filter(~correlated)
    )


def _plain(value: Any) -> float | str | None:
    return value.isoformat() if isinstance(value, datetime) else value


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC)
