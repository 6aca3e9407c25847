"""Reads the runs table: pages, values of columns, groups, known names and saved views."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.db.models import Count, Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import Team, User
from orchestrator.common.errors import Refusal, invalid, missing_object
from orchestrator.common.units import is_id
from orchestrator.run_table.columns import (
    Column,
    ColumnNames,
    completions,
    read_column,
    read_columns,
)
from orchestrator.run_table.conditions import conditions
from orchestrator.run_table.groups import RunGroup, Spread, run_groups
from orchestrator.run_table.language import QueryError
from orchestrator.run_table.models import SavedView
from orchestrator.run_table.order import (
    MatchingRuns,
    PageEnd,
    Sort,
    read_place,
    sorted_ids,
    write_place,
)
from orchestrator.runs import selectors as runs_selectors
from orchestrator.runs.models import ParameterName, Run, RunParameter
from orchestrator.runs.serializers import serialize_runs
from orchestrator.telemetry.models import MetricName, MetricSummary

__all__ = [
    "Column",
    "ColumnNames",
    "MatchingRuns",
    "PageEnd",
    "QueryError",
    "RunGroup",
    "Sort",
    "Spread",
    "column_values",
    "completions",
    "known_names",
    "matching",
    "metric_names_of",
    "query_refusal",
    "read_columns",
    "read_sort",
    "run_groups",
    "run_page",
    "serialize_page",
    "table_ids",
    "table_runs",
    "team_names",
    "view_get",
    "views_visible_to",
]


def known_names(*, user: User) -> ColumnNames:
    """Metrics and spec values of the runs that the user may see; two queries."""
    owners = people.visible_owners(user)
    metrics, config = MetricName.objects.all(), ParameterName.objects.all()
    if owners is not None:
        metrics, config = metrics.filter(owner__in=owners), config.filter(owner__in=owners)
    return ColumnNames(
        frozenset(metrics.values_list("name", flat=True)),
        frozenset(config.values_list("name", flat=True)),
    )


def query_refusal(query: str, error: QueryError) -> Refusal:
    """The 422 of a query that cannot be read: the text with a caret below the position."""
    line = query.replace("\n", " ").replace("\t", " ")
    start = max(0, error.at - 60)
    shown, at = line[start : error.at + 60], error.at - start
    refusal = invalid("query", f"at character {error.at + 1}: {error.message}", error.hint)
    text = f"{error.message}. {error.hint}".rstrip()
    refusal.detail = f"{text}\n{shown}\n{' ' * at}^"
    return refusal


def read_sort(text: str, names: ColumnNames) -> Sort | None:
    """The order written as `-min(val_loss)`; None for an empty text. Raises Refusal."""
    text = text.strip()
    if not text:
        return None
    try:
        return Sort(read_column(text.removeprefix("-"), names), text.startswith("-"))
    except QueryError as error:
        raise invalid("sort", error.message, error.hint) from None


def table_runs(
    *, user: User, query: str = "", names: ColumnNames | None = None, **filters: Any
) -> QuerySet[Run]:
    """All visible runs that pass a query and the filters of `runs.selectors.run_list`.

    Raises Refusal with the position of the error for a query that cannot be read.
    """
    return matching(user=user, query=query, names=names, **filters).runs


def matching(
    *, user: User, query: str = "", names: ColumnNames | None = None, **filters: Any
) -> MatchingRuns:
    """As `table_runs`, for pages in an order. Raises 422 for a wrong query."""
    runs = runs_selectors.runs_matching(user=user, **filters)
    if not query.strip():
        return MatchingRuns(runs, runs)
    try:
        names = names or known_names(user=user)
        near = runs.filter(conditions(query, names, correlated=True))
        return MatchingRuns(runs.filter(conditions(query, names)), near)
    except QueryError as error:
        raise query_refusal(query, error) from None


def table_ids(
    *, runs: MatchingRuns, sort: Sort | None, after: str = "", limit: int = 50
) -> list[tuple[int, str]]:
    """`(id, cursor)` of at most `limit` rows in an order, after a cursor."""
    rows = sorted_ids(runs, sort, after=read_place(after), limit=limit)
    return [(id, write_place(place)) for id, place in rows]


def run_page(ids: Sequence[int]) -> list[Run]:
    """The runs with these ids in this order, with owner, experiment and tags."""
    rows = Run.objects.filter(pk__in=ids).select_related("owner", "experiment")
    by_id = {run.pk: run for run in rows.prefetch_related("tags")}
    return [by_id[id] for id in ids if id in by_id]


def serialize_page(ids: Sequence[int]) -> list[dict[str, Any]]:
    """The REST representation of the runs with these ids in this order."""
    by_id = {row["id"]: row for row in serialize_runs(Run.objects.filter(pk__in=ids))}
    return [by_id[str(id)] for id in ids if str(id) in by_id]


def column_values(
    ids: Collection[int], columns: Sequence[Column]
) -> dict[int, dict[str, float | str]]:
    """`{run: {column key: value}}` of metric and config columns; two queries."""
    values: dict[int, dict[str, float | str]] = {id: {} for id in ids}
    metrics = [column for column in columns if column.source == "metric"]
    config = [column for column in columns if column.source == "config"]
    if metrics:
        rows = MetricSummary.objects.filter(run_id__in=ids, name__in={one.name for one in metrics})
        for row in rows:
            for column in metrics:
                value = getattr(row, column.aggregate)
                if column.name == row.name and value is not None:
                    values[row.run_id][column.key] = value
    if config:
        parameters = RunParameter.objects.filter(
            run_id__in=ids, name__in={one.name for one in config}
        )
        for run, name, number, text in parameters.values_list("run_id", "name", "number", "text"):
            values[run][name] = text if number is None else number
    return values


def metric_names_of(ids: Collection[int]) -> list[str]:
    """Metrics of these runs, those that most runs have first."""
    rows = MetricSummary.objects.filter(run_id__in=ids).values("name")
    counted = rows.annotate(runs=Count("pk")).order_by("-runs", "name")
    return [row["name"] for row in counted]


def views_visible_to(*, user: User) -> QuerySet[SavedView]:
    """The user's views and those of their teams, by name."""
    teams = Team.objects.filter(members=user)
    rows = SavedView.objects.filter(Q(owner=user) | Q(team__in=teams))
    return rows.select_related("owner", "team").order_by("name", "pk")


def view_get(*, user: User, id: int | str) -> SavedView:
    """A view that the user sees. Raises 404."""
    if is_id(id):
        view = views_visible_to(user=user).filter(pk=int(id)).first()
        if view is not None:
            return view
    raise missing_object("view", id)


def team_names(*, user: User) -> list[str]:
    """The names of the user's teams."""
    return list(Team.objects.filter(members=user).order_by("name").values_list("name", flat=True))
