"""Groups of runs by a column, with the number of runs and the aggregates of other columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Avg, Count, F, FloatField, Max, Min, OuterRef, QuerySet, Subquery
from django.db.models.functions import Cast

from orchestrator.common.errors import invalid
from orchestrator.run_table.columns import Column
from orchestrator.run_table.conditions import FIELDS
from orchestrator.runs.models import Run, RunParameter
from orchestrator.telemetry.models import MetricSummary

MOST: Final = 200  # groups; those with the most runs
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

    Raises Refusal for a column that has no groups: a metric, a time.
    """
    rows: QuerySet[Any] = runs.order_by()
    if by.source == "config":
        texts = RunParameter.objects.filter(run=OuterRef("pk"), name=by.name).values("text")[:1]
        rows = rows.annotate(group_value=Subquery(texts))
    elif by.source == "run" and by.name in _GROUPABLE:
        rows = rows.annotate(group_value=F("tags__name" if by.name == "tag" else FIELDS[by.name]))
    else:
        hint = "Use for example model, state, tag or a value of the spec."
        raise invalid("group", f"runs cannot be grouped by {by.key}", hint)
    numbers = [column for column in columns if column.source in ("metric", "config")]
    for place, column in enumerate(numbers):
        rows = rows.annotate(**{f"number_{place}": _number(column)})
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


def _number(column: Column) -> Any:
    if column.source == "metric":
        rows: QuerySet[Any] = MetricSummary.objects.filter(run=OuterRef("pk"), name=column.name)
        return Subquery(rows.values(column.aggregate)[:1])
    parameters = RunParameter.objects.filter(run=OuterRef("pk"), name=column.name)
    return Cast(Subquery(parameters.values("number")[:1]), FloatField())
