"""The scheduler's actions: handle a report, place queued runs, check attempts, remove a node."""

from __future__ import annotations

from django.db import transaction
from django.db.models import OuterRef, Subquery

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import conflict, invalid
from orchestrator.fleet import node_probes
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Device, Node, NodeProbe
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.periodic_checks import reap
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.reserved import windows
from orchestrator.scheduling.tick import TickResult, tick
from workers.contracts.wire.maintenance.node_probe import FULL_S, MOST_S

__all__ = ["TickResult", "node_probe", "node_remove", "reap", "report", "tick"]


def node_probe(*, node: Node, by: User | None, seconds: float = FULL_S) -> NodeProbe:
    """Ask an idle node to measure its devices for the planner; `by` None: the control plane.

    Raises 403, and 409 for a node that is busy, does not answer, or is being probed.
    """
    if by is not None:
        accounts.require_role(by, Role.OPERATOR, "probe nodes")
    if not 1 <= seconds <= MOST_S:
        raise invalid("seconds", f"{seconds:g} is not from 1 to {MOST_S:.0f}", f"Use {FULL_S:.0f}.")
    if attempts := runs.attempts_on(node=node.name):
        listed = ", ".join(f"run {attempt.run_id}" for attempt in attempts[:5])
        raise conflict(
            f"{node.name} is busy: {listed}. A probe measures an idle node; wait until they end.",
            type="node-busy",
        )
    if node.health != Node.Health.UP:
        raise conflict(f"{node.name} is {node.health}; it cannot be probed.", type="node-away")
    if node_probes.in_progress(node=node):
        raise conflict(f"{node.name} is being probed.", type="node-busy")
    row = node_probes.request_record(node=node, by=by.username if by is not None else "")
    if not dispatch.measure(node, seconds=seconds):
        message = "The order was not sent: the broker is unreachable, or the agent is older."
        node_probes.failure_record(node=node, message=message)
        raise conflict(f"{node.name} was not probed. {message}", retry=True)
    if by is not None:
        accounts.audit(actor=by, action="node.probe", target=f"node:{node.pk}", data={})
    return row


def node_remove(*, node: Node, by: User) -> None:
    """Remove a node from the fleet. Raises 403, or 409 while attempts are on it.

    Its messages are read first, for up to 5 s. Allocations remain, with the names they had. Windows
    of no other node end.
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
        windows.remove_node(node=node, by=by)
        fleet.node_remove(node=node, by=by, unread=unread)
