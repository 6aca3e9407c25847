"""Clears nodes for maintenance and reservations: preempts runs that last into a window.

Such a run has no limit and lasts longer than predicted, or started before the window was created.
It gets the usual notice shortly before the start and uses none of its retries.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from orchestrator.runs.models import Attempt
from orchestrator.scheduling.models import NodeWindow
from orchestrator.scheduling.placement import fair_shares
from orchestrator.scheduling.preemption.requests import GRACE_S, request
from workers.contracts.wire.node_messages import AttemptState, RunState


def clear(*, now: datetime) -> int:
    """Request the preemption of runs on nodes whose window begins; returns their number."""
    soon = now + timedelta(seconds=GRACE_S)
    begun = list(
        NodeWindow.objects.filter(start__lte=soon, end__gt=now)
        .select_related("pool", "team")
        .prefetch_related("nodes")
    )
    if not begun:
        return 0
    teams, requested = fair_shares.memberships(), set[int]()
    for window in begun:
        names = {node.name for node in window.nodes.all()}
        held = Attempt.objects.filter(
            allocations__released=None,
            allocations__device__node__pool=window.pool,
            state=AttemptState.RUNNING,
            requested="",
            run__state=RunState.RUNNING,
        )
        if names:
            held = held.filter(allocations__device__node__name__in=names)
        for run, owner in held.distinct().values_list("run_id", "run__owner__username"):
            of_team = window.team is not None and teams.get(owner) == window.team.name
            if not of_team and run not in requested and request(run, by=None, need=_need(window)):
                requested.add(run)
    return len(requested)


def _need(window: NodeWindow) -> str:
    use = f"team {window.team.name}" if window.team else "maintenance"
    return (
        f"Its nodes are reserved for {use} from {window.start.astimezone(UTC):%Y-%m-%d %H:%M} to "
        f"{window.end.astimezone(UTC):%Y-%m-%d %H:%M} UTC."
    )
