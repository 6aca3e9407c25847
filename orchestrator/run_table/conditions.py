"""Translates a query's tree to a filter of runs.

A condition on a metric or spec value has two forms. As a set, an index answers it alone, which is
fast if few runs match. Correlated, it is one lookup per run, which is fast for few runs.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils.dateparse import parse_date, parse_datetime

from orchestrator.common import clock
from orchestrator.run_table.columns import Column, ColumnNames
from orchestrator.run_table.language import Comparison, Node, QueryError, Value, parse
from orchestrator.runs.models import RunParameter, RunTag
from orchestrator.telemetry.models import MetricSummary

_LOOKUPS: Final = {"=": "", "<": "__lt", "<=": "__lte", ">": "__gt", ">=": "__gte"}
# columns of a run: their fields
FIELDS: Final = {
    "id": "pk",
    "name": "name",
    "state": "state",
    "kind": "kind",
    "model": "model_name",
    "owner": "owner__username",
    "experiment": "experiment__name",
    "pool": "pool_name",
    "notes": "notes",
    "exit": "exit__class",
    "devices": "devices",
    "priority": "priority",
    "attempt": "attempt_number",
    "created": "created",
    "started": "started",
    "ended": "ended",
}
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(r"(-?[\d.]+(?:e-?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_NOTHING: Final = "none"


def conditions(text: str, names: ColumnNames, *, correlated: bool = False) -> Q:
    """The filter of a query; empty for an empty query. Raises QueryError."""
    tree = parse(text)
    return Q() if tree is None else _Filter(names, correlated).condition(tree)


class _Filter:
    """Builds the filter of one query in one of its forms."""

    def __init__(self, names: ColumnNames, correlated: bool) -> None:
        self.names, self.correlated = names, correlated

    def condition(self, node: Node) -> Q:
        if isinstance(node, Comparison):
            return self.comparison(node)
        parts = [self.condition(part) for part in node.parts]
        if node.word == "not":
            return ~parts[0]
        result = parts[0]
        for part in parts[1:]:
            result = result & part if node.word == "and" else result | part
        return result

    def comparison(self, node: Comparison) -> Q:
        column = self.names.column(node.name, node.aggregate, node.at)
        if node.operator == "in":
            result = Q()
            for value in node.values:
                result |= self.one(column, "=", value)
            return result
        value = node.values[0]
        if not value.quoted and value.text.lower() == _NOTHING and node.operator in ("=", "!="):
            present = self.present(column)
            return ~present if node.operator == "=" else present
        if node.operator == "!=":
            return self.present(column) & ~self.one(column, "=", value)
        return self.one(column, node.operator, value)

    def present(self, column: Column) -> Q:
        """Runs that have a value."""
        if column.source == "metric":
            return self.metric(column.name, {f"{column.aggregate}__isnull": False})
        if column.source == "config":
            return self.with_row(RunParameter.objects.filter(name=column.name))
        if column.name == "tag":
            return self.with_row(RunTag.objects.all())
        if column.type == "duration":
            return Q(started__isnull=False) if column.name == "duration" else Q()
        field = FIELDS[column.name]
        if column.name in ("experiment", "started", "ended", "exit"):
            return Q(**{f"{field}__isnull": False})
        return ~Q(**{field: ""}) if column.type == "text" else Q()

    def one(self, column: Column, operator: str, value: Value) -> Q:
        """Runs whose value compares to this one."""
        if column.source == "metric":
            number = _number(value, operator)
            lookup = {f"{column.aggregate}{_LOOKUPS[operator]}": number}
            return self.metric(column.name, lookup)
        if column.source == "config":
            return self.parameter(column.name, operator, value)
        if column.name == "tag":
            rows = RunTag.objects.filter(**_text_lookup("name", operator, value))
            return self.with_row(rows)
        field = FIELDS.get(column.name, "")
        match column.type:
            case "text":
                return Q(**_text_lookup(field, operator, value))
            case "time":
                return Q(**{f"{field}{_lookup(operator, value)}": _time(value)})
            case "duration":
                return _duration(column.name, operator, value)
        return Q(**{f"{field}{_lookup(operator, value)}": _number(value, operator)})

    def metric(self, name: str, lookup: dict[str, Any]) -> Q:
        return self.with_row(MetricSummary.objects.filter(name=name, **lookup))

    def parameter(self, name: str, operator: str, value: Value) -> Q:
        rows = RunParameter.objects.filter(name=name)
        number = None if value.quoted else _parsed(value.text)
        if number is not None and operator != "~":
            rows = rows.filter(**{f"number{_LOOKUPS[operator]}": number})
        elif operator in ("=", "~"):
            rows = rows.filter(**_text_lookup("text", operator, value))
        else:
            message = f"{value.text!r} is not a number"
            raise QueryError(message, value.at, f"Write for example {name} {operator} 0.001.")
        return self.with_row(rows)

    def with_row(self, rows: QuerySet[Any]) -> Q:
        """Runs that have one of these rows."""
        if self.correlated:
            return Q(Exists(rows.filter(run_id=OuterRef("pk"))))
        return Q(pk__in=rows.values("run_id"))


def _text_lookup(field: str, operator: str, value: Value) -> dict[str, Any]:
    if operator == "=":
        return {field: value.text}
    if operator == "~":
        return {f"{field}__icontains": value.text}
    raise QueryError(f"{operator!r} does not apply to text", value.at, "Use = or ~ (contains).")


def _lookup(operator: str, value: Value) -> str:
    if operator == "~":
        raise QueryError("~ applies to text only", value.at, "Use = < <= > >=.")
    return _LOOKUPS[operator]


def _number(value: Value, operator: str) -> float:
    _lookup(operator, value)
    number = None if value.quoted else _parsed(value.text)
    if number is None:
        raise QueryError(
            f"{value.text!r} is not a number", value.at, "Use a number such as 0.5 or 1e-4."
        )
    return number


def _parsed(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _time(value: Value) -> datetime:
    try:
        moment = parse_datetime(value.text)
        day = parse_date(value.text) if moment is None else None
    except ValueError:
        moment, day = None, None
    if day is not None:
        moment = datetime(day.year, day.month, day.day, tzinfo=UTC)
    if moment is None:
        hint = 'Use a date such as "2026-11-01" or "2026-11-01T12:00", or age < 7d.'
        raise QueryError(f"{value.text!r} is not a date", value.at, hint)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _duration(name: str, operator: str, value: Value) -> Q:
    match = _DURATION.fullmatch(value.text.strip())
    number = _parsed(match[1]) if match else None
    unit = match[2].lower() or "s" if match else ""
    if number is None or unit not in _SECONDS or abs(number * _SECONDS[unit]) > 1e10:
        hint = "Use a duration such as 90s, 15m, 2h or 7d."
        raise QueryError(f"{value.text!r} is not a duration", value.at, hint)
    lookup, span = _lookup(operator, value), timedelta(seconds=number * _SECONDS[unit])
    now = clock.now()
    turned = {"__lt": "__gt", "__lte": "__gte", "__gt": "__lt", "__gte": "__lte"}.get(lookup, "")
    try:
        started = now - span
    except OverflowError:
        raise QueryError(f"{value.text!r} is too long", value.at) from None
    if name == "age":
        return Q(**{f"created{turned}": started})
    running = Q(ended__isnull=True, started__isnull=False, **{f"started{turned}": started})
    return running | Q(ended__isnull=False, **{f"ended{lookup}": F("started") + span})
