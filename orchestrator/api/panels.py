"""Panels of dashboards and reports: their data, the matches of a pattern, names to choose from."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.responses import gzip_if_large, json_response
from orchestrator.api.schemas.base import Id
from orchestrator.panels.expand import expand, search_names
from orchestrator.panels.resolve import resolve
from orchestrator.panels.spec import Kind, PanelSpec, RunsSource
from orchestrator.panels.viewed_runs import PanelViewer
from workers.contracts.base import Contract

router = Router(tags=["dashboards"])
_Subject = Annotated[
    RunsSource | None, Field(description="runs of panels that name none of their own")
]


class PanelIn(Contract):
    """A panel, and whose data it shows."""

    panel: PanelSpec
    subject: _Subject = None


class NamesIn(Contract):
    """Names that a panel of a kind can show; `pattern` is a regular expression."""

    kind: Kind = "line"
    runs: _Subject = None
    pattern: Annotated[str, Field(max_length=200)] = ""


class EmptyOut(Schema):
    """Why a panel shows nothing: a code, what it is about, and a known name like it."""

    code: str
    subject: str
    near: str
    detail: str


class PanelRunOut(Schema):
    """A run of a panel."""

    id: Id
    name: str
    state: str


class PanelDataOut(Schema):
    """What a panel draws; `content` depends on its kind. docs/dashboards.md lists the fields."""

    kind: str
    title: str
    unit: str
    runs: list[PanelRunOut]
    content: dict[str, Any]
    missing: list[str] = Field(description="metrics that no run has")
    hidden_runs: int = Field(description="chosen runs that you may not see, or that are deleted")
    more_runs: bool = Field(description="the source has more runs than its limit")
    active: bool = Field(description="a run may still log")
    empty: EmptyOut | None


class PanelsOut(Schema):
    """One panel per match, at most 50; `left_out` counts the others."""

    panels: list[dict[str, Any]]
    matches: int
    left_out: int
    empty: EmptyOut | None


class NamesOut(Schema):
    """At most 200 names, and how many there are."""

    items: list[str]
    total: int


@router.post("/data", response=PanelDataOut, auth=require_scope("read"), summary="Get panel data")
def data(request: HttpRequest, body: PanelIn) -> HttpResponse:
    """The data that a panel shows you: only runs that you may see. Changes nothing."""
    viewer = PanelViewer(user(request), body.subject)
    return gzip_if_large(request, json_response(resolve(body.panel, viewer).to_dict()))


@router.post("/expand", response=PanelsOut, auth=require_scope("read"), summary="Expand a pattern")
def expanded(request: HttpRequest, body: PanelIn) -> Any:
    """One panel per name that the panel's pattern matches. Changes nothing."""
    result = expand(body.panel, PanelViewer(user(request), body.subject))
    return {
        "panels": [panel.to_document() for panel in result.panels],
        "matches": result.matches,
        "left_out": result.left_out,
        "empty": result.empty,
    }


@router.post("/names", response=NamesOut, auth=require_scope("read"), summary="Search metrics")
def names(request: HttpRequest, body: NamesIn) -> Any:
    """Metrics or media whose name the pattern matches. Changes nothing."""
    items = search_names(
        viewer=PanelViewer(user(request)), kind=body.kind, source=body.runs, pattern=body.pattern
    )
    return {"items": items[:200], "total": len(items)}
