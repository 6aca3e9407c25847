"""GET events: events of all runs that the caller may see, newest first."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.pagination import last_key, paginated
from orchestrator.api.schemas.runs import EventOut
from orchestrator.runs import selectors

router = Router(tags=["fleet"])


@router.get("", response=list[EventOut], auth=require_scope("read"), summary="List events")
@paginated(
    name="events",
    serialize=selectors.serialize_event,
    newest_first=True,
    pass_parameter="page",
)
def events(
    request: HttpRequest, type: str | None = None, run: int | None = None, **paging: Any
) -> Any:
    """Events of all runs that you may see, newest first.

    `type` takes one event type or a comma-separated list. A run's own events are also at
    `runs/{id}/events`, oldest first.
    """
    page = paging["page"]
    return selectors.events_visible_to(
        user=user(request),
        run=get_run(request, run) if run is not None else None,
        types=type.split(",") if type else None,
        before_id=last_key(page, "events"),
        limit=page.limit + 1,
    )
