"""The queue: who waits for what, why, and when it may start.

What the scheduler decided, told; decides nothing.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.pagination import Page, paged_whole
from orchestrator.api.schemas import PageOf, QueueOut
from orchestrator.scheduling import selectors

router = Router(tags=["fleet"])


@router.get(
    "",
    response=PageOf[QueueOut],
    auth=needs("read"),
    summary="Waiting runs in order, each with its reason",
)
def queue(request: HttpRequest, page: Page) -> dict[str, Any]:
    entries = selectors.queue_visible_to(user=user(request))
    return paged_whole(entries, page, "queue", lambda entry: entry.position, _shape)


def _shape(entry: Any) -> dict[str, Any]:
    run = entry.run
    return {
        "run": str(run.pk),
        "name": run.name,
        "owner": run.owner.get_username(),
        "devices": run.devices,
        "pool": run.pool_name,
        "priority": run.priority,
        "queued_at": run.queued_at,
        "position": entry.position,
        "reason": entry.reason,
        "may_start": entry.may_start,
    }
