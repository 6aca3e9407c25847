"""Windows: maintenance of nodes and their reservation for a team."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time, aware
from orchestrator.scheduling.reserved import windows
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


class NewWindow(Contract):
    """Nodes of a pool that take only the runs of a team, or none, for a time."""

    pool: Annotated[str, Field(min_length=1, max_length=80)]
    nodes: list[Annotated[str, Field(max_length=80)]] = Field(
        default=[], max_length=2000, description="names; empty: all nodes of the pool"
    )
    start: datetime
    end: datetime
    team: Annotated[str, Field(max_length=80)] = Field("", description="empty: maintenance")
    reason: Annotated[str, Field(max_length=200)] = ""


class WindowOut(Schema):
    """A window. No run is placed that may last into it, except the team's."""

    id: Id
    pool: str
    nodes: list[str] = Field(description="empty: all nodes of the pool")
    team: str = Field(description="empty: maintenance")
    reason: str
    start: Time
    end: Time
    created_by: str


def _window(row: Any) -> dict[str, Any]:
    return {
        "id": row.pk,
        "pool": row.pool.name,
        "nodes": sorted(node.name for node in row.nodes.all()),
        "team": row.team.name if row.team else "",
        "reason": row.reason,
        "start": row.start,
        "end": row.end,
        "created_by": row.created_by,
    }


@router.get("", response=list[WindowOut], auth=require_scope("read"), summary="List windows")
@paginated(name="windows", serialize=_window)
def window_list(request: HttpRequest) -> Any:
    """Present and future windows, and those that ended in the last 30 days."""
    return windows.windows().order_by("pk")


@router.post("", response={201: WindowOut}, auth=require_scope("fleet"), summary="Reserve nodes")
@creates(WindowOut)
def window_create(request: HttpRequest, body: NewWindow) -> dict[str, Any]:
    """Reserves nodes for maintenance or for a team. For operators."""
    start, end = aware(body.start), aware(body.end)
    assert start is not None and end is not None  # the fields are required
    return _window(
        windows.window_create(
            by=user(request),
            pool=body.pool,
            nodes=body.nodes,
            start=start,
            end=end,
            team=body.team,
            reason=body.reason,
        )
    )


@router.get("/{int:id}", response=WindowOut, auth=require_scope("read"), summary="Get a window")
def window(request: HttpRequest, id: int) -> dict[str, Any]:
    """One window."""
    return _window(windows.window_get(id))


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("fleet"), summary="Delete a window"
)
def window_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Ends or cancels the window. For operators."""
    windows.window_delete(window=windows.window_get(id), by=user(request))
    return HttpResponse(status=204)
