"""Events of all runs that the caller may see, newest first.

One run's own are at `runs/{id}/events`.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.lookup import run_of
from orchestrator.api.http.pagination import Page, after, paged
from orchestrator.api.schemas import EventOut, PageOf
from orchestrator.runs import selectors

router = Router(tags=["fleet"])


@router.get(
    "", response=PageOf[EventOut], auth=needs("read"), summary="What happened, newest first"
)
def events(
    request: HttpRequest, page: Page, type: str | None = None, run: int | None = None
) -> dict[str, Any]:
    """`type` takes one event type or several with commas between."""
    rows = selectors.events_visible_to(
        user=user(request),
        run=run_of(request, run) if run is not None else None,
        types=type.split(",") if type else None,
        before_id=after(page, "events"),
        limit=page.limit + 1,
    )
    return paged(rows, page, "events", lambda event: event.pk, selectors.event_answer)
