"""GET audit: the audit log, for administrators, as pages or as one CSV file."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, StreamingHttpResponse
from ninja import Field, Query, Router

from orchestrator.accounts import audit_log
from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.responses import stream_response
from orchestrator.api.schemas.accounts import AuditOut
from workers.contracts.base import Contract

router = Router(tags=["accounts"])
Text = Annotated[str, Field(max_length=200)]


class AuditQuery(Contract):
    """Which entries; without a field all."""

    action: Annotated[Text, Field(description="`run.cancel`, or all of a kind: `run.`")] = ""
    target: Annotated[Text, Field(description="`run:12`")] = ""
    actor: Annotated[Text, Field(description="name of the user")] = ""
    q: Annotated[Text, Field(description="in user, action or target")] = ""
    since: Annotated[Text, Field(description="first day (UTC)")] = ""
    until: Annotated[Text, Field(description="last day (UTC)")] = ""


def _entries(request: HttpRequest, query: AuditQuery) -> Any:
    wanted = audit_log.Search(
        action=query.action,
        user=query.actor,
        target=query.target,
        text=query.q,
        since=query.since,
        until=query.until,
    )
    return audit_log.search(user=user(request), wanted=wanted)


@router.get("", response=list[AuditOut], auth=require_scope("admin"), summary="List audit entries")
@paginated(name="audit", newest_first=True)
def audit(request: HttpRequest, query: Query[AuditQuery]) -> Any:
    """Who did what, newest first."""
    return _entries(request, query)


@router.get(
    "/export",
    auth=require_scope("admin"),
    summary="Export audit entries",
    openapi_extra={"responses": {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}},
)
def export(request: HttpRequest, query: Query[AuditQuery]) -> StreamingHttpResponse:
    """The newest 100,000 matching entries as CSV."""
    lines = audit_log.csv_lines(_entries(request, query))
    parts = (line.encode() for line in lines)
    return stream_response(request, parts, "text/csv; charset=utf-8")
