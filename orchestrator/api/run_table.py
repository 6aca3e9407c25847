"""The runs table: names for queries, groups, CSV, Parquet, and saved views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja import Query, Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.responses import stream_response
from orchestrator.api.schemas.base import Id, Time
from orchestrator.api.schemas.run_requests import Filters
from orchestrator.run_table import selectors, services
from orchestrator.run_table.export import table_csv, table_parquet
from workers.contracts.base import Contract

router = Router(tags=["runs"])
views = Router(tags=["runs"])
_PARQUET = "application/vnd.apache.parquet"
_Columns = Annotated[
    str, Field(max_length=4000, description="comma-separated: `val_loss,min(loss),train.seq_len`")
]


class ColumnOut(Schema):
    """A name that queries and columns may use."""

    name: str
    source: str = Field(description="run, metric or config (a value of spec or plan)")
    type: str = Field(description="text, number, time, duration or any")


class ColumnsOut(Schema):
    """All names; a metric is also `min(name)`, `max(name)` and `mean(name)`."""

    items: list[ColumnOut]


class Table(Filters):
    """Filters, order and columns of the runs table."""

    columns: _Columns = ""


class Grouped(Filters):
    """Filters, and how to group."""

    by: Annotated[str, Field(max_length=200, description="a column: model, tag, train.seq_len")]
    columns: _Columns = ""


class SpreadOut(Schema):
    """Over the runs of a group that have the number."""

    mean: float | None
    min: float | None
    max: float | None


class GroupOut(Schema):
    """The runs with one value; null: those without one."""

    value: str | None
    count: int
    spreads: dict[str, SpreadOut]


class GroupsOut(Schema):
    """At most 200 groups, the largest first."""

    items: list[GroupOut]


class ViewOut(Schema):
    """A saved view: the address of the runs page after `?`."""

    id: Id
    name: str
    query: str
    owner: str
    team: str | None
    created: Time


class NewView(Contract):
    """A view to save; replaces your view of the same name."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    query: Annotated[str, Field(max_length=8000, description="of the page's URL, without ?")]
    team: Annotated[str, Field(max_length=150, description="share with this team")] = ""


@router.get("/columns", response=ColumnsOut, auth=require_scope("read"), summary="List columns")
def column_list(request: HttpRequest) -> Any:
    """Metrics and values of specs of the runs that you may see."""
    names = selectors.known_names(user=user(request))
    return {"items": selectors.completions(names)}


@router.get(
    "/csv",
    auth=require_scope("read"),
    summary="Download the table as CSV",
    openapi_extra={"responses": {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}},
)
def table_as_csv(request: HttpRequest, wanted: Query[Table]) -> HttpResponseBase:
    """Every run that passes the filters, as CSV, with the columns."""
    return _file(request, wanted, table_csv, "text/csv; charset=utf-8", "runs.csv")


@router.get(
    "/parquet",
    auth=require_scope("read"),
    summary="Download the table as Parquet",
    openapi_extra={
        "responses": {
            200: {"content": {_PARQUET: {"schema": {"type": "string", "format": "binary"}}}}
        }
    },
)
def table_as_parquet(request: HttpRequest, wanted: Query[Table]) -> HttpResponseBase:
    """Every run that passes the filters, as a Parquet file, with the columns."""
    return _file(request, wanted, table_parquet, _PARQUET, "runs.parquet")


@router.get("/groups", response=GroupsOut, auth=require_scope("read"), summary="Group runs")
def group_list(request: HttpRequest, wanted: Query[Grouped]) -> Any:
    """Numbers of runs by a value, with mean, minimum and maximum of the columns."""
    by = user(request)
    names = selectors.known_names(user=by)
    columns, _ = selectors.read_columns(wanted.columns, names)
    key = selectors.read_sort(wanted.by, names)
    if key is None:
        return {"items": []}
    runs = selectors.table_runs(user=by, names=names, **wanted.chosen(by))
    return {"items": selectors.run_groups(runs, key.column, columns)}


@views.get("", response=list[ViewOut], auth=require_scope("read"), summary="List views")
@paginated(name="run-views", serialize=lambda view: _view(view))
def view_list(request: HttpRequest) -> Any:
    """Your views of the runs page and those of your teams."""
    return selectors.views_visible_to(user=user(request)).order_by("pk")


@views.post("", response={201: ViewOut}, auth=require_scope("runs"), summary="Save a view")
@creates(ViewOut)
def view_create(request: HttpRequest, body: NewView) -> Any:
    """Saves a view of the runs page for you, or for a team of yours."""
    return _view(services.view_save(owner=user(request), **body.model_dump()))


@views.delete("/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete")
def view_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes your view."""
    by = user(request)
    services.view_delete(view=selectors.view_get(user=by, id=id), by=by)
    return HttpResponse(status=204)


def _file(
    request: HttpRequest,
    wanted: Table,
    write: Callable[..., Iterator[bytes]],
    content_type: str,
    filename: str,
) -> HttpResponseBase:
    by = user(request)
    names = selectors.known_names(user=by)
    columns, _ = selectors.read_columns(wanted.columns, names)
    sort = selectors.read_sort(wanted.sort or "", names)
    runs = selectors.matching(user=by, names=names, **wanted.chosen(by))
    response = stream_response(request, write(runs, sort=sort, columns=columns), content_type)
    response["Content-Disposition"] = f'attachment; filename="{filename}"'
    return response


def _view(view: Any) -> dict[str, Any]:
    return {
        "id": str(view.pk),
        "name": view.name,
        "query": view.query,
        "owner": view.owner.username,
        "team": view.team.name if view.team else None,
        "created": view.created,
    }
