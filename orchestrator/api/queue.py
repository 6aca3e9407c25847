"""GET queue: the waiting runs, each with its reason and estimated start."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.pagination import Paging, last_key, paginated
from orchestrator.api.schemas.runs import QueueOut
from orchestrator.common.units import iso
from orchestrator.scheduling import selectors

router = Router(tags=["fleet"])


def _serialize(entry: Any) -> dict[str, Any]:
    run = entry.run
    return {
        "run": str(run.pk),
        "name": run.name,
        "owner": run.owner.get_username(),
        "devices": run.devices,
        "pool": run.pool_name,
        "priority": run.priority,
        "queued_at": iso(run.queued_at),
        "position": entry.position,
        "reason": entry.reason,
        "may_start": iso(entry.may_start),
        "earliest_start": iso(entry.earliest),
        "latest_start": iso(entry.latest),
        "sooner": entry.sooner,
    }


@router.get("", response=list[QueueOut], auth=require_scope("read"), summary="List the queue")
@paginated(
    name="queue",
    key=lambda entry: entry.position,
    serialize=_serialize,
    as_json=True,
    pass_parameter="pagination_info",
)
def queue(request: HttpRequest, **kwargs: Any) -> Any:
    """Waiting runs in the order in which they start, each with its reason and estimated start."""
    page: Paging = kwargs["pagination_info"]
    after = max(0, last_key(page, "queue") or 0)
    return selectors.queue_entries(user=user(request), limit=page.limit + 1, after=after)
