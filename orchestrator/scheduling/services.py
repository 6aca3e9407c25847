"""The scheduler's actions: handle a report, place queued runs, check attempts, remove a node."""

from __future__ import annotations

from django.db import transaction
from django.db.models import OuterRef, Subquery

from orchestrator.accounts.models import User
from orchestrator.common.errors import conflict
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import selectors as runs
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reaper import reap
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.tick import TickResult, tick

__all__ = ["TickResult", "node_remove", "reap", "report", "tick"]


def node_remove(*, node: Node, by: User) -> None:
    """Remove a node from the fleet. Raises 403, or 409 while attempts are on it.

    Its messages are read first, for up to 5 s. Allocations remain, with the names they had.
    """
    if attempts := runs.attempts_on(node=node.name):
        listed = ", ".join(f"run {attempt.run_id}" for attempt in attempts[:5])
        raise conflict(
            f"{node.name} has {len(attempts)} active attempts ({listed}). Drain it and wait until "
            "they end, or cancel the runs.",
            type="node-busy",
        )
    unread = fleet.node_close(node=node, by=by)
    with transaction.atomic():
        # usage is accounted from these rows, also that of days that are not stored yet
        Allocation.objects.filter(device__node=node).update(
            device_index=Subquery(
                Device.objects.filter(pk=OuterRef("device_id")).values("index")[:1]
            ),
            node_name=node.name,
            pool_name=node.pool.name,
        )
        fleet.node_remove(node=node, by=by, unread=unread)
