"""Translates a query's tree to a filter of runs.

Conditions on metrics and spec values are subqueries that an index answers alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db.models import F, Q
from django.utils.dateparse import parse_date, parse_datetime

from orchestrator.common import clock
from orchestrator.run_table.columns import Column, Names
from orchestrator.run_table.language import Comparison, Group, Node, QueryError, Value, parse
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


def conditions(text: str, names: Names) -> Q:
    """The filter of a query; empty for an empty query. Raises QueryError."""
    tree = parse(text)
    return Q() if tree is None else _condition(tree, names)


def _condition(node: Node, names: Names) -> Q:
    if isinstance(node, Comparison):
        return _comparison(node, names)
    parts = [_condition(part, names) for part in node.parts]
    return ~parts[0] if node.word == "not" else _joined(node, parts)


def _joined(node: Group, parts: Sequence[Q]) -> Q:
    result = parts[0]
    for part in parts[1:]:
        result = result & part if node.word == "and" else result | part
    return result


def _comparison(node: Comparison, names: Names) -> Q:
    column = names.column(node.name, node.aggregate, node.at)
    values = node.values
    if node.operator == "in":
        return _any([_one(column, "=", value) for value in values])
    value = values[0]
    if not value.quoted and value.text.lower() == _NOTHING and node.operator in ("=", "!="):
        present = _present(column)
        return ~present if node.operator == "=" else present
    if node.operator == "!=":
        return _present(column) & ~_one(column, "=", value)
    return _one(column, node.operator, value)


def _any(parts: Sequence[Q]) -> Q:
    result = Q()
    for part in parts:
        result |= part
    return result


def _present(column: Column) -> Q:
    """Runs that have a value."""
    if column.source == "metric":
        return _metric(column.name, {f"{column.aggregate}__isnull": False})
    if column.source == "config":
        return Q(pk__in=RunParameter.objects.filter(name=column.name).values("run_id"))
    if column.name == "tag":
        return Q(pk__in=RunTag.objects.values("run_id"))
    if column.type == "duration":
        return Q(started__isnull=False) if column.name == "duration" else Q()
    field = FIELDS[column.name]
    if column.name in ("experiment", "started", "ended", "exit"):
        return Q(**{f"{field}__isnull": False})
    return ~Q(**{field: ""}) if column.type == "text" else Q()


def _one(column: Column, operator: str, value: Value) -> Q:
    if column.source == "metric":
        number = _number(value, operator)
        return _metric(column.name, {f"{column.aggregate}{_LOOKUPS[operator]}": number})
    if column.source == "config":
        return _parameter(column.name, operator, value)
    if column.name == "tag":
        rows = RunTag.objects.filter(**_text_lookup("name", operator, value))
        return Q(pk__in=rows.values("run_id"))
    field = FIELDS.get(column.name, "")
    match column.type:
        case "text":
            return Q(**_text_lookup(field, operator, value))
        case "time":
            return Q(**{f"{field}{_lookup(operator, value)}": _time(value)})
        case "duration":
            return _duration(column.name, operator, value)
    return Q(**{f"{field}{_lookup(operator, value)}": _number(value, operator)})


def _metric(name: str, lookup: dict[str, Any]) -> Q:
    return Q(pk__in=MetricSummary.objects.filter(name=name, **lookup).values("run_id"))


def _parameter(name: str, operator: str, value: Value) -> Q:
    rows = RunParameter.objects.filter(name=name)
    number = None if value.quoted else _parsed(value.text)
    if number is not None and operator != "~":
        rows = rows.filter(**{f"number{_LOOKUPS[operator]}": number})
    elif operator in ("=", "~"):
        rows = rows.filter(**_text_lookup("text", operator, value))
    else:
        raise QueryError(f"{value.text!r} is not a number", value.at, f"{name} {operator} 0.001")
    return Q(pk__in=rows.values("run_id"))


def _text_lookup(field: str, operator: str, value: Value) -> dict[str, Any]:
    if operator == "=":
        return {field: value.text}
    if operator == "~":
        return {f"{field}__icontains": value.text}
    raise QueryError(f"{operator!r} does not apply to text", value.at, "use = or ~ (contains)")


def _lookup(operator: str, value: Value) -> str:
    if operator == "~":
        raise QueryError("~ applies to text only", value.at, "use = < <= > >=")
    return _LOOKUPS[operator]


def _number(value: Value, operator: str) -> float:
    _lookup(operator, value)
    number = None if value.quoted else _parsed(value.text)
    if number is None:
        raise QueryError(f"{value.text!r} is not a number", value.at, "for example 0.5 or 1e-4")
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
        hint = 'for example "2026-11-01" or "2026-11-01T12:00"; or age < 7d'
        raise QueryError(f"{value.text!r} is not a date", value.at, hint)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _duration(name: str, operator: str, value: Value) -> Q:
    match = _DURATION.fullmatch(value.text.strip())
    number = _parsed(match[1]) if match else None
    unit = match[2].lower() or "s" if match else ""
    if number is None or unit not in _SECONDS or abs(number * _SECONDS[unit]) > 1e10:
        hint = "for example 90s, 15m, 2h or 7d"
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
