"""Clears nodes for maintenance and reservations: preempts runs that last into a window.

Such a run has no limit and lasts longer than predicted, or started before the window was created.
It gets the usual notice shortly before the start and uses none of its retries.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from django.db.models import Q

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
        .select_related("team")
        .prefetch_related("nodes")
    )
    if not begun:
        return 0
    of_pool: dict[int, list[NodeWindow]] = {}
    of_node: dict[int, list[NodeWindow]] = {}
    for window in begun:
        nodes = window.nodes.all()
        for node in nodes:
            of_node.setdefault(node.pk, []).append(window)
        if not nodes:
            of_pool.setdefault(window.pool_id, []).append(window)
    teams, requested = fair_shares.memberships(), set[int]()
    for run, owner, node_id, pool in _running_on(of_node, of_pool):
        windows = [*of_node.get(node_id, ()), *of_pool.get(pool, ())]
        for window in sorted(windows, key=lambda each: each.pk):
            of_team = window.team is not None and teams.get(owner) == window.team.name
            if not of_team and run not in requested and request(run, by=None, need=_need(window)):
                requested.add(run)
    return len(requested)


def _running_on(nodes: Iterable[int], pools: Iterable[int]) -> list[tuple[int, str, int, int]]:
    """`(run, owner, node, pool)` of runs that hold devices there and were not asked to stop."""
    held = Attempt.objects.filter(
        Q(allocations__device__node__in=list(nodes))
        | Q(allocations__device__node__pool__in=list(pools)),
        allocations__released=None,
        state=AttemptState.RUNNING,
        requested="",
        run__state=RunState.RUNNING,
    )
    rows = held.values_list(
        "run_id",
        "run__owner__username",
        "allocations__device__node",
        "allocations__device__node__pool",
    )
    return list(rows.order_by("run_id", "allocations__device__node").distinct())


def _need(window: NodeWindow) -> str:
    use = f"team {window.team.name}" if window.team else "maintenance"
    return (
        f"Its nodes are reserved for {use} from {window.start.astimezone(UTC):%Y-%m-%d %H:%M} to "
        f"{window.end.astimezone(UTC):%Y-%m-%d %H:%M} UTC."
    )
