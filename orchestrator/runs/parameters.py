"""Writes the values of specs and plans to the table that the runs table filters and sorts by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from orchestrator.runs.models import ParameterName, Run, RunParameter

# keys that have columns of their own, do not change what a run does, or are secret
IGNORED: Final = frozenset(
    ("kind", "tags", "notes", "priority", "model", "serve.api_key", "script.secrets")
)
MOST: Final = 200  # parameters of a run
_LONGEST: Final = 200  # characters of a name or value


def store(run: Run) -> None:
    """Write the run's parameters; inside the transaction that creates the run."""
    rows = rows_of(run)
    RunParameter.objects.bulk_create(rows, ignore_conflicts=True)
    names = [ParameterName(owner_id=run.owner_id, name=row.name) for row in rows]
    ParameterName.objects.bulk_create(names, ignore_conflicts=True)


def replace(run: Run, before: str, values: Mapping[str, Any]) -> None:
    """Replace the rows whose names begin with `before` by these values; in a transaction."""
    rows = []
    for name, value in flat(values, before):
        if value is not None and len(name) <= _LONGEST and "\0" not in name:
            number, text = typed(value)
            rows.append(RunParameter(run_id=run.pk, name=name, number=number, text=text))
    rows = rows[:MOST]
    RunParameter.objects.filter(run=run, name__startswith=before).delete()
    RunParameter.objects.bulk_create(rows, ignore_conflicts=True)
    names = [ParameterName(owner_id=run.owner_id, name=row.name) for row in rows]
    ParameterName.objects.bulk_create(names, ignore_conflicts=True)


def rows_of(run: Run) -> list[RunParameter]:
    """The rows of a run, not saved; at most `MOST`."""
    spec = {**run.spec, "plan": run.plan} if run.plan else dict(run.spec)
    rows = []
    for name, value in flat(spec):
        if name in IGNORED or value is None or len(name) > _LONGEST:
            continue
        number, text = typed(value)
        rows.append(RunParameter(run_id=run.pk, name=name, number=number, text=text))
    return rows[:MOST]


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, value)` of all leaves of nested mappings; lists are leaves."""
    for name, value in values.items():
        path = f"{before}{name}"
        if path in IGNORED:
            yield path, None
        elif isinstance(value, Mapping):
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def typed(value: Any) -> tuple[float | None, str]:
    """The number, if it is one, and the text of a value."""
    if isinstance(value, bool):
        return None, "true" if value else "false"
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return None, str(value)[:_LONGEST]
        return (number if math.isfinite(number) else None), f"{value:g}"[:_LONGEST]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return None, text.replace("\0", "")[:_LONGEST]
