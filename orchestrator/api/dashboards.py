"""Dashboards: panels of a run, an experiment, a team or a person, as JSON."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.accounts import teams
from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.etags import etag_response, if_match_version
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import MAX_ID, get_experiment, get_run
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.dashboards import selectors, services
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.panels.spec import PanelSpec
from workers.contracts.base import Contract

router = Router(tags=["dashboards"])
_Name = Annotated[str, Field(min_length=1, max_length=120)]
_Key = Annotated[int | None, Field(ge=1, le=MAX_ID)]


class DashboardOut(Schema):
    """A dashboard; without run, experiment and team it is of its owner alone."""

    id: Id
    name: str
    owner: str
    run: Id | None
    experiment: Id | None
    team: Id | None
    version: int = Field(description="raised by each edit; the ETag begins with it")
    created: Time
    updated: Time
    document: dict[str, Any] = Field(description="as in a creating request")


class NewDashboard(Contract):
    """A dashboard to create; without run, experiment and team it is yours alone."""

    name: _Name
    run: _Key = None
    experiment: _Key = None
    team: _Key = None
    document: DashboardSpec = DashboardSpec()


class DashboardChange(Contract):
    """What to change; omitted fields keep their values."""

    name: _Name | None = None
    document: DashboardSpec | None = None


@router.get("", response=list[DashboardOut], auth=require_scope("read"), summary="List dashboards")
@paginated(name="dashboards", serialize=selectors.serialize_dashboard, newest_first=True)
def dashboard_list(
    request: HttpRequest,
    run: _Key = None,
    experiment: _Key = None,
    team: _Key = None,
    q: str = "",
) -> Any:
    """Your dashboards and those of the runs, experiments and teams that you may see."""
    return selectors.dashboards_visible_to(
        user=user(request), run=run, experiment=experiment, team=team, q=q
    )


@router.post(
    "", response={201: DashboardOut}, auth=require_scope("runs"), summary="Create a dashboard"
)
@creates(DashboardOut, location="/api/v1/dashboards/{id}")
def dashboard_create(request: HttpRequest, body: NewDashboard) -> Any:
    """Creates a dashboard. 422 names the panel and field that is wrong."""
    by = user(request)
    row = services.dashboard_create(
        owner=by,
        name=body.name,
        spec=body.document,
        run=get_run(request, body.run) if body.run else None,
        experiment=get_experiment(request, body.experiment) if body.experiment else None,
        team=teams.team_get(user=by, id=body.team) if body.team else None,
    )
    return selectors.serialize_dashboard(row)


@router.get(
    "/{int:id}", response=DashboardOut, auth=require_scope("read"), summary="Get a dashboard"
)
def dashboard(request: HttpRequest, id: int) -> HttpResponse:
    """One dashboard, with an ETag for If-Match (PATCH)."""
    row = selectors.dashboard_get(user=user(request), id=id)
    return etag_response(request, selectors.serialize_dashboard(row), row.version)


@router.patch(
    "/{int:id}", response=DashboardOut, auth=require_scope("runs"), summary="Change a dashboard"
)
def dashboard_update(request: HttpRequest, id: int, body: DashboardChange) -> HttpResponse:
    """Renames it, or replaces its document. With If-Match: 412 if it was edited since."""
    by = user(request)
    row = services.dashboard_update(
        dashboard=selectors.dashboard_get(user=by, id=id),
        by=by,
        name=body.name,
        spec=body.document,
        version=if_match_version(request),
    )
    return etag_response(request, selectors.serialize_dashboard(row), row.version)


@router.post(
    "/{int:id}/panels",
    response={201: DashboardOut},
    auth=require_scope("runs"),
    summary="Add a panel",
)
@creates(DashboardOut)
def panel_add(request: HttpRequest, id: int, body: PanelSpec) -> Any:
    """Adds a panel at the end, a pinned one after the pinned ones. Its id gets a number if another
    panel has it.
    """
    by = user(request)
    row = services.panel_add(dashboard=selectors.dashboard_get(user=by, id=id), by=by, panel=body)
    return selectors.serialize_dashboard(row)


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete a dashboard"
)
def dashboard_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes a dashboard; runs and their metrics stay."""
    by = user(request)
    services.dashboard_delete(dashboard=selectors.dashboard_get(user=by, id=id), by=by)
    return HttpResponse(status=204)
