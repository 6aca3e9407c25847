"""Usage reports: device-seconds and cost by team, person, pool, experiment, day or month."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Field, Query, Router, Schema

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.responses import wants_csv
from orchestrator.background_jobs.usage import reports
from workers.contracts.base import Contract

router = Router(tags=["usage"])
CSV = "text/csv; charset=utf-8"


class UsageQuery(Contract):
    """The period, both days included (UTC), and the groups."""

    since: Annotated[str, Field(alias="from", description="default: 30 days before `to`")] = ""
    to: Annotated[str, Field(description="default: today")] = ""
    by: Literal["team", "person", "pool", "experiment", "day", "month"] = "team"
    monthly: Annotated[bool, Field(description="one row per group and month")] = False


class UsageRow(Schema):
    """Device-seconds of one group; productive and lost time are of ended attempts."""

    key: str = Field(description="name or time of the group; empty: without one")
    device_s: float = Field(description="time for which devices were held")
    productive_s: float
    lost_s: float
    attempts: int = Field(description="counted once per day on which they held devices")
    cost_usd: float = Field(description="at the typical prices of the device catalogue")
    energy_kwh: float | None = Field(
        None, description="of devices whose power was measured, times ORRERY_PUE; null: none was"
    )
    co2_kg: float | None = Field(None, description="of this energy, by ORRERY_CO2_G_PER_KWH")
    month: str = Field("", description="2026-01; only with `monthly`")


class UsageOut(Schema):
    """Rows by falling usage, days by date. A person counts for each of their teams."""

    since: str = Field(serialization_alias="from")
    to: str
    by: str
    items: list[UsageRow]
    total: UsageRow
    final: bool = Field(description="false while today or late accounts may still change it")


@router.get(
    "",
    response=UsageOut,
    by_alias=True,
    auth=require_scope("read"),
    summary="Get a usage report",
    openapi_extra={"responses": {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}},
)
def usage(request: HttpRequest, query: Query[UsageQuery]) -> Any:
    """Usage of the people whose runs you may see, from stored days; CSV with `Accept: text/csv`."""
    since, until = reports.period(query.since, query.to)
    result = reports.report(
        user=user(request), since=since, until=until, by=query.by, monthly=query.monthly
    )
    if wants_csv(request):
        return HttpResponse(reports.report_csv(result), content_type=CSV)
    return {
        "since": since.isoformat(),
        "to": until.isoformat(),
        "by": result.by,
        "items": [row.to_dict() for row in result.rows],
        "total": result.total.to_dict(),
        "final": result.final,
    }
