"""The queue: waiting runs with reasons and estimated starts; what a change would do to them."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.pagination import Paging, last_key, paginated
from orchestrator.api.schemas.runs import QueueOut
from orchestrator.common.units import iso
from orchestrator.scheduling import selectors
from orchestrator.scheduling.queue import what_if as changes
from orchestrator.scheduling.simulation.what_if import Change
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


def _serialize(entry: Any) -> dict[str, Any]:
    run = entry.run
    return {
        "run": str(run.pk),
        "name": run.name,
        "owner": run.owner.get_username(),
        "devices": run.devices,
        "min_devices": run.sizes[-1]["devices"] if run.sizes else None,
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


class WhatIf(Contract):
    """A change of the live queue: nodes like the pool's largest one, a team without runs."""

    pool: Annotated[str, Field(max_length=80)] = ""
    add_nodes: Annotated[int, Field(ge=0, le=changes.MOST_NODES)] = 0
    pause_team: Annotated[str, Field(max_length=80)] = ""


class WhatIfRun(Schema):
    """A waiting run; seconds until its estimated start, null if unknown."""

    run: str
    before_s: float | None
    after_s: float | None = Field(description="null for a run of the paused team, too")


class WhatIfOut(Schema):
    """Estimated starts before and after the change, of the first waiting runs."""

    waiting: int
    compared: int = Field(description="runs with an estimate before and after")
    mean_before_s: float | None
    mean_after_s: float | None
    starting: int = Field(description="runs that start at once after the change")
    runs: list[WhatIfRun]


@router.post(
    "/what-if", response=WhatIfOut, auth=require_scope("fleet"), summary="Simulate a change"
)
def what_if(request: HttpRequest, body: WhatIf) -> dict[str, Any]:
    """Simulates the live queue before and after a change; changes nothing. For operators."""
    change = Change(body.pool, body.add_nodes, body.pause_team)
    result = changes.what_if(by=user(request), change=change)
    return {
        "waiting": result.waiting,
        "compared": result.compared,
        "mean_before_s": result.before_s,
        "mean_after_s": result.after_s,
        "starting": result.starting,
        "runs": [
            {"run": str(row.run.pk), "before_s": row.before_s, "after_s": row.after_s}
            for row in result.rows
        ],
    }
