"""Groups of runs by a column, with the number of runs and the aggregates of other columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Avg, Count, F, FilteredRelation, Max, Min, Q, QuerySet

from orchestrator.common.errors import invalid
from orchestrator.run_table.columns import Column
from orchestrator.run_table.conditions import FIELDS
from orchestrator.runs.models import Run

MOST: Final = 200  # groups; those with the most runs
MOST_NUMBERS: Final = 40  # of a group; each may be a join, of which SQLite has 64
_GROUPABLE: Final = frozenset(
    ("state", "kind", "model", "owner", "experiment", "tag", "pool", "devices", "priority", "exit")
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, minimum and maximum over the runs of a group that have the number."""

    mean: float | None
    min: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class RunGroup:
    """The runs with one value of a column; `value` None: those without one."""

    value: str | None
    count: int
    spreads: dict[str, Spread]  # by the key of the column


def run_groups(runs: QuerySet[Run], by: Column, columns: list[Column]) -> list[RunGroup]:
    """The groups of `runs`, largest first; `columns` are those to aggregate.

    Raises 422 for a column that has no groups (a metric, a time), and for too many `columns`.
    """
    rows: QuerySet[Any] = runs.order_by()
    if by.source == "config":
        rows = _with_row(rows, "group_row", by).annotate(group_value=F("group_row__text"))
    elif by.source == "run" and by.name in _GROUPABLE:
        rows = rows.annotate(group_value=F("tags__name" if by.name == "tag" else FIELDS[by.name]))
    else:
        hint = "Use for example model, state, tag or a value of the spec."
        raise invalid("group", f"runs cannot be grouped by {by.key}", hint)
    numbers = [column for column in columns if column.source in ("metric", "config")]
    if len(numbers) > MOST_NUMBERS:
        message = f"{len(numbers)} metrics and values of the spec, more than {MOST_NUMBERS}"
        raise invalid("columns", message, f"Use at most {MOST_NUMBERS}.")
    joined = dict[tuple[str, str], str]()  # the alias of each joined row
    for place, column in enumerate(numbers):
        if (key := (column.source, column.name)) not in joined:
            joined[key] = f"row_{place}"
            rows = _with_row(rows, joined[key], column)
        field = column.aggregate if column.source == "metric" else "number"
        rows = rows.annotate(**{f"number_{place}": F(f"{joined[key]}__{field}")})
    aggregates: dict[str, Any] = {"group_runs": Count("pk")}
    for place, _ in enumerate(numbers):
        name = f"number_{place}"
        aggregates |= {
            f"mean_{place}": Avg(name),
            f"min_{place}": Min(name),
            f"max_{place}": Max(name),
        }
    grouped = rows.values("group_value").annotate(**aggregates).order_by("-group_runs")[:MOST]
    return [
        RunGroup(
            None if row["group_value"] is None else str(row["group_value"]),
            row["group_runs"],
            {
                column.key: Spread(row[f"mean_{i}"], row[f"min_{i}"], row[f"max_{i}"])
                for i, column in enumerate(numbers)
            },
        )
        for row in grouped
    ]


def _with_row(rows: QuerySet[Any], alias: str, column: Column) -> QuerySet[Any]:
    """Joins each run's row of a metric or spec value; a run has at most one of a name.

    A join, since PostgreSQL hashes both sides of it, but runs a subquery once per run.
    """
    relation = "metric_summaries" if column.source == "metric" else "parameters"
    condition = Q(**{f"{relation}__name": column.name})
    joined: QuerySet[Any] = rows.annotate(
        **{alias: FilteredRelation(relation, condition=condition)}
    )
    return joined
