"""History of nodes and of the fleet, idle allocated devices, and the energy of runs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.conf import settings
from django.http import HttpRequest
from ninja import Query, Router
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import get_node
from orchestrator.api.schemas.base import aware
from orchestrator.api.schemas.device_history import (
    EnergyOut,
    FleetHistoryOut,
    IdleDevicesOut,
    NodeHistoryOut,
)
from orchestrator.background_jobs.usage import electricity
from orchestrator.common.errors import missing_object
from orchestrator.device_history import idle, selectors, totals
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


class PeriodQuery(Contract):
    """A period; by default the last 24 hours."""

    since: Annotated[datetime | None, Field(alias="from", description="default: a day before")] = (
        None
    )
    to: Annotated[datetime | None, Field(description="default: now")] = None
    points: Annotated[int, Field(ge=1, le=selectors.MOST_POINTS)] = 300

    def period(self) -> selectors.Period:
        """The columns. Raises Refusal 422."""
        since, until = aware(self.since), aware(self.to)
        return selectors.period_between(since=since, until=until, points=self.points)


class FleetQuery(PeriodQuery):
    """A period of the whole fleet or of one pool."""

    pool: Annotated[str, Field(max_length=80)] = ""


class EnergyQuery(PeriodQuery):
    """A period of whole hours, and the groups."""

    by: Annotated[str, Field(description="team, person, experiment or run", max_length=20)] = "team"


@router.get(
    "/nodes/{id}/history",
    response=NodeHistoryOut,
    auth=require_scope("read"),
    summary="Get the history of a node",
)
def node_history(request: HttpRequest, id: str, query: Query[PeriodQuery]) -> Any:
    """Readings of the node and its devices: minutes up to 24 hours, else quarter hours."""
    row, over = get_node(request, id), query.period()
    history = selectors.node_history(node=row, over=over)
    return {"node": row.name, **totals.node_series(history, over)}


@router.get(
    "/fleet/history",
    response=FleetHistoryOut,
    auth=require_scope("read"),
    summary="Get the history of the fleet",
)
def fleet_history(request: HttpRequest, query: Query[FleetQuery]) -> Any:
    """Devices with readings, allocated, busy and idle ones, their utilization and power."""
    over = query.period()
    if query.pool and query.pool not in selectors.pool_names():
        raise missing_object("pool with readings", query.pool)
    history = selectors.fleet_history(over=over, pools=[query.pool] if query.pool else None)
    return totals.fleet_series(history, over)


@router.get(
    "/fleet/idle-devices",
    response=IdleDevicesOut,
    auth=require_scope("read"),
    summary="List idle allocated devices",
)
def idle_devices(request: HttpRequest, pool: str = "") -> Any:
    """Devices that attempts hold and that have done no work for ten minutes, longest first."""
    rows = idle.idle_devices_visible_to(user=user(request), pool=pool)
    return {"items": rows, "device_s": sum(row.idle_s for row in rows)}


@router.get(
    "/fleet/energy",
    response=EnergyOut,
    auth=require_scope("read"),
    summary="Get the energy and CO2 of runs",
)
def energy(request: HttpRequest, query: Query[EnergyQuery]) -> Any:
    """Energy and idle time of the runs that you may see, from measured power. See also `usage`."""
    over = query.period()
    rows, total = electricity.report(
        user=user(request),
        since=selectors.time_of(over.start),
        until=selectors.time_of(over.end),
        by=query.by,
    )
    return {
        "by": query.by,
        "pue": settings.ENV.pue,
        "co2_g_per_kwh": settings.ENV.co2_g_per_kwh,
        "items": [row.to_dict() for row in rows],
        "total": total.to_dict(),
    }
