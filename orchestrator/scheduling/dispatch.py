"""Sends orders to nodes after the commit: launch, control of an attempt, pin a checkpoint.

The timer repeats lost messages; the agent's claim ignores repeated ones. Does not decide anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from kombu.exceptions import OperationalError

from orchestrator.common import clock
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import celery_client
from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import ControlOrder, KeepOrder, LaunchOrder

log = logging.getLogger(__name__)


def launch(attempt: Attempt, *, nodes: Iterable[str] | None = None) -> bool:
    """Send launch orders to the attempt's nodes (or `nodes`); False if one was not sent."""
    shares = attempt.placement
    known = {
        node.name: node
        for node in Node.objects.filter(name__in=[share["node"] for share in shares])
    }
    kinds = dict(Device.objects.filter(node__name=shares[0]["node"]).values_list("index", "kind"))
    sent = True
    for share in shares:
        if nodes is not None and share["node"] not in nodes:
            continue
        node = known.get(share["node"])
        if node is None:
            continue  # removed from the fleet: the reaper ends the attempt
        order = launch_order(attempt, share, gpu=kinds.get(share["devices"][0]) == "gpu")
        sent &= _send(node, names.TASK_LAUNCH, names.KIND_LAUNCH, order.to_dict())
    if sent:
        run_services.attempt_dispatched(attempt=attempt)
    return sent


def launch_order(attempt: Attempt, share: dict[str, Any], *, gpu: bool) -> LaunchOrder:
    """The launch order for one node's share of an attempt."""
    run, shares = attempt.run, sorted(attempt.placement, key=lambda item: item["node_rank"])
    before = [item for item in shares if item["node_rank"] < share["node_rank"]]
    folder = f"runs/{run.pk}/attempt-{attempt.number}"
    if settings.ENV.shared_runs and len(shares) > 1:
        # shared file system: each node's supervisor has its own directory
        folder += f"/node-{share['node_rank']}"
    return LaunchOrder.from_dict(
        {
            "run": str(run.pk),
            "run_name": run.name,
            "kind": run.kind,
            "attempt": attempt.number,
            "attempt_id": str(attempt.pk),
            "fence": str(attempt.fence),
            "spec": runs.launch_spec(run),
            "plan": run.plan,
            "node_rank": share["node_rank"],
            "nodes": len(shares),
            "local_devices": share["devices"],
            "local_ranks": len(share["devices"]),
            "world_size": sum(len(item["devices"]) for item in shares),
            "rank_offset": sum(len(item["devices"]) for item in before),
            "run_dir": folder,
            "resume_from": attempt.resume_from,
            "shared_dir": f"runs/{run.pk}" if settings.ENV.shared_runs else None,
            "device_kind": "gpu" if gpu else "cpu",
            "max_seconds": (run.spec.get("resources") or {}).get("max_seconds"),
            "hang_s": (run.spec.get("resources") or {}).get("hang_s") or settings.ENV.hang_s,
            "grace_s": settings.ENV.cancel_grace_s,
            "rendezvous": {"host": shares[0]["address"]},
        }
    )


def control(
    attempt: Attempt,
    action: str,
    *,
    nodes: Iterable[str] | None = None,
    grace_s: float | None = None,
) -> bool:
    """Send an action to the attempt's nodes (or `nodes`) that have not exited; False on failure."""
    wanted = set(nodes) if nodes is not None else {share["node"] for share in attempt.placement}
    wanted -= set(attempt.nodes_exited)
    grace = settings.ENV.cancel_grace_s if grace_s is None else grace_s
    order = ControlOrder(
        attempt_id=str(attempt.pk), fence=str(attempt.fence), action=action, grace_s=grace
    )
    sent = True
    for node in Node.objects.filter(name__in=wanted):
        sent &= _send(node, names.TASK_CONTROL, names.KIND_CONTROL, order.to_dict())
    return sent


def pin_checkpoint(nodes: Iterable[str], *, source: str, target: str) -> bool:
    """Order nodes to keep a checkpoint under a second name; False if one was not sent."""
    order, sent = KeepOrder(source=source, target=target), True
    for node in Node.objects.filter(name__in=list(nodes)):
        sent &= _send(node, names.TASK_KEEP, names.KIND_KEEP, order.to_dict())
    return sent


def kill_stale_attempt(node: Node, *, attempt_id: str, fence: str) -> bool:
    """Kill an attempt on a node that was abandoned while the node was unreachable."""
    order = ControlOrder(attempt_id=attempt_id, fence=fence, action="kill", grace_s=0.0)
    return _send(node, names.TASK_CONTROL, names.KIND_CONTROL, order.to_dict())


def _send(node: Node, task: str, kind: str, body: dict[str, Any]) -> bool:
    try:
        secret = fleet.node_secret(node)
        text = envelope.seal(
            secret, kind, body, ttl_s=names.ORDER_TTL_S, now=time.time(), node=node.name
        )
        celery_client.send(task=task, node=node.name, envelope=text)
    except (OperationalError, OSError, ValueError) as error:
        log.warning(
            "The %s order for %s was not sent at %s and will be repeated: %s",
            kind,
            node.name,
            clock.now(),
            error,
        )
        return False
    return True
