"""Sends orders to nodes after the commit: launch, control of an attempt, pin a checkpoint.

The timer repeats lost messages; the agent's claim ignores repeated ones. Does not decide anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.conf import settings
from django.db.models import prefetch_related_objects
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from orchestrator.accounts.models import User
from orchestrator.common import clock, secret_text
from orchestrator.fleet import probe_history
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs.code import record
from orchestrator.runs.datasets import resolve as data_sets
from orchestrator.runs.models import Attempt
from orchestrator.runs.outputs import produce_servers
from orchestrator.runs.plan_trials.orders import trials_order
from orchestrator.runs.store import access
from orchestrator.scheduling import celery_client
from orchestrator.scheduling.cluster_engines import requests
from workers.contracts.base import WireContract
from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire import encrypted_text, envelope, liveness, names, versions
from workers.contracts.wire.field_versions import message_for
from workers.contracts.wire.maintenance.storage import CollectOrder
from workers.contracts.wire.node_messages import (
    ControlOrder,
    KeepOrder,
    LaunchOrder,
    ProbeOrder,
    RunOwner,
)

log = logging.getLogger(__name__)


def launch(attempt: Attempt, *, nodes: Iterable[str] | None = None) -> bool:
    """Send launch orders to the attempt's nodes (or `nodes`); False if one was not sent."""
    return launch_many([attempt], nodes=nodes)


def launch_many(attempts: Sequence[Attempt], *, nodes: Iterable[str] | None = None) -> bool:
    """Send the launch orders of several attempts, with the queries of one; False on failure."""
    names_ = {share["node"] for attempt in attempts for share in attempt.placement}
    known = {node.name: node for node in Node.objects.filter(name__in=names_).defer("inventory")}
    devices = Device.objects.filter(node__name__in=names_)
    kinds = {
        (node, index): (kind, memory)
        for node, index, kind, memory in devices.values_list(
            "node__name", "index", "kind", "memory_bytes"
        )
    }
    only = None if nodes is None else set(nodes)
    prefetch_related_objects([attempt.run for attempt in attempts], "owner")
    secrets = runs.script_secrets_of(attempt.run for attempt in attempts)
    older = {attempt.pk for attempt in attempts if _older_nodes(attempt, known)}
    probes = {
        attempt.pk: _preflight(attempt)
        for attempt in attempts
        if attempt.pk not in older  # its nodes probe together
    }
    sealed: list[celery_client.Order] = []
    complete = []
    for attempt in attempts:
        variables = variables_of(attempt, secrets.get(attempt.run_id, {}))
        if variables is None:
            complete.append(attempt)
            continue
        if variables and (old := _older_nodes(attempt, known)):
            _end_without_secrets(attempt, old)
            complete.append(attempt)
            continue
        orders: list[celery_client.Order | None] = []
        shares = attempt.placement
        for share in shares:
            node = known.get(share["node"])
            if node is None or (only is not None and share["node"] not in only):
                continue  # removed from the fleet: periodic_checks ends the attempt
            kind, memory = kinds.get((shares[0]["node"], share["devices"][0]), ("", 0))
            order = launch_order(
                attempt,
                share,
                gpu=kind == "gpu",
                memory_bytes=memory,
                preflight=probes.get(attempt.pk),
                older=attempt.pk in older,
            )
            if variables or access.configured():
                order = _with_secrets(order, node, variables)
            orders.append(_seal(node, names.TASK_LAUNCH, names.KIND_LAUNCH, order))
        sealed += [item for item in orders if item is not None]
        if None not in orders:
            complete.append(attempt)
    # after a failure all are repeated: agents ignore those that arrived
    dispatched = complete if _send(sealed) else []
    run_services.attempts_dispatched(attempts=dispatched)
    return len(dispatched) == len(attempts)


def variables_of(
    attempt: Attempt, secrets: Mapping[str, str] | secret_text.Unreadable
) -> Mapping[str, str] | None:
    """Secret variables of the programs; None if one was missing, which ends the attempt."""
    if isinstance(secrets, secret_text.Unreadable):
        _end_unreadable(attempt, secrets)
        return None
    if attempt.run.kind in produce_servers.KINDS:
        addresses = produce_servers.variables(run=attempt.run)
        if isinstance(addresses, str):
            _end_without_server(attempt, addresses)
            return None
        return addresses
    return secrets


def _with_secrets(order: LaunchOrder, node: Node, variables: Mapping[str, str]) -> LaunchOrder:
    """The order with secret variables and store; neither broker nor run directory shows them."""
    try:
        key = fleet.node_secret(node)
    except ValueError:
        return order  # it cannot be sealed either
    return with_secrets(access.with_store(order, key), key, variables)


def with_secrets(order: LaunchOrder, key: bytes, variables: Mapping[str, str]) -> LaunchOrder:
    """The order with the variables encrypted under the receiver's key."""
    purpose = order.secret_purpose
    secrets = {
        name: encrypted_text.encrypt(key, text, purpose=purpose) for name, text in variables.items()
    }
    return order.model_copy(update={"secrets": secrets})


def _end_unreadable(attempt: Attempt, error: secret_text.Unreadable) -> None:
    reason = (
        f"A secret of this run cannot be read ({error}). Add the earlier key to "
        "ORRERY_SECRET_KEY_FALLBACKS and retry the run, or clone it and enter the value again."
    )
    run_services.attempt_exited(
        attempt=attempt, exit_class=ExitClass.USER_ERROR, exit={"reason": reason}
    )


def _end_without_server(attempt: Attempt, reason: str) -> None:
    """The server stopped after the placement: the run waits again, at no cost to its budgets."""
    run_services.attempt_exited(
        attempt=attempt, exit_class=ExitClass.PREEMPTED, exit={"reason": reason}
    )


def _older_nodes(attempt: Attempt, nodes: Mapping[str, Node]) -> list[Node]:
    """The attempt's nodes of release 0.1, which supports neither secret variables nor probes."""
    placed = [nodes[share["node"]] for share in attempt.placement if share["node"] in nodes]
    return [node for node in placed if fleet.peer(node).wire == versions.FIRST]


def _end_without_secrets(attempt: Attempt, nodes: Sequence[Node]) -> None:
    names_ = ", ".join(sorted(node.name for node in nodes))
    reason = (
        f"Node {names_} runs release 0.1, which cannot receive secret variables of scripts. "
        f"Upgrade it ({versions.DOCUMENT})."
    )
    run_services.attempt_exited(
        attempt=attempt, exit_class=ExitClass.INFRASTRUCTURE, exit={"reason": reason}
    )


def _preflight(attempt: Attempt) -> dict[str, list[dict[str, Any]]] | None:
    """`{node: references}` of an attempt that is probed before it starts; None for others."""
    least, devices = settings.ENV.preflight_devices, attempt.devices
    if not least or devices < least:
        return None
    return probe_history.references(nodes=[share["node"] for share in attempt.placement])


def launch_order(
    attempt: Attempt,
    share: dict[str, Any],
    *,
    gpu: bool,
    memory_bytes: int = 0,
    preflight: dict[str, list[dict[str, Any]]] | None = None,
    older: bool = False,
) -> LaunchOrder:
    """The launch order for one node's share of an attempt.

    `memory_bytes` of its smallest device, 0 if unknown. `preflight` has the record of each node;
    None: no probe. `older`: a node of the attempt is of
    release 0.1.
    """
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
            "spec": runs.launch_spec(run, attempt),
            "plan": attempt.plan,
            "node_rank": share["node_rank"],
            "nodes": len(shares),
            "local_devices": share["devices"],
            "local_ranks": len(share["devices"]),
            "world_size": sum(len(item["devices"]) for item in shares),
            "rank_offset": sum(len(item["devices"]) for item in before),
            "run_dir": folder,
            "owner": {"id": run.owner_id, "name": run.owner.username},
            "reads": runs.runs_read_by(run),
            "resume_from": attempt.resume_from,
            "program": record.program_order(run),
            "trials": trials_order(attempt),
            "inputs": [item.to_dict() for item in data_sets.inputs_of(run)],
            "shared_dir": f"runs/{run.pk}" if settings.ENV.shared_runs else None,
            "device_kind": "gpu" if gpu else "cpu",
            "device_memory_bytes": memory_bytes or None,
            "max_seconds": (run.spec.get("resources") or {}).get("max_seconds"),
            "hang_s": (run.spec.get("resources") or {}).get("hang_s") or settings.ENV.hang_s,
            "grace_s": settings.ENV.cancel_grace_s,
            "lease_s": liveness.lease_seconds(settings.ENV.node_lost_s),
            "rendezvous": {
                "host": shares[0]["address"],
                "node": None if older else shares[0]["node"],
            },
            "preflight": None
            if preflight is None
            else {
                "least_share": settings.ENV.preflight_share,
                "references": preflight.get(share["node"], []),
            },
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
    if attempt.in_engine:
        return requests.send(attempt, order, nodes=wanted)
    sent = True
    for node in Node.objects.filter(name__in=wanted):
        sent &= _send_one(node, names.TASK_CONTROL, names.KIND_CONTROL, order)
    return sent


def pin_checkpoint(nodes: Iterable[str], *, source: str, target: str, owner: User) -> bool:
    """Order nodes to keep a checkpoint of a run of `owner` under a second name; False if one was
    not sent.
    """
    of_owner = RunOwner(id=owner.pk, name=owner.username)
    order, sent = KeepOrder(source=source, target=target, owner=of_owner), True
    for node in Node.objects.filter(name__in=list(nodes)):
        sent &= _send_one(node, names.TASK_KEEP, names.KIND_KEEP, order)
    return sent


def collect(node: Node, *, checkpoints: Sequence[str], attempts: Sequence[str]) -> bool:
    """Order a node to delete these paths and to report its run folders; False if not sent."""
    if (fleet.peer(node).wire or versions.FIRST) < versions.WireVersion(1, 1):
        return False  # an agent of version 0.1 has no such task
    order = CollectOrder(checkpoints=list(checkpoints), attempts=list(attempts), scan=True)
    return _send_one(node, names.TASK_COLLECT, names.KIND_COLLECT, order)


def measure(node: Node, *, seconds: float) -> bool:
    """Order a node to measure its devices for the planner; False if not sent."""
    if (fleet.peer(node).wire or versions.FIRST) < versions.WireVersion(1, 1):
        return False  # an agent of version 0.1 would only send a heartbeat
    order = ProbeOrder(request=f"measure {node.name}", measure_s=seconds)
    return _send_one(node, names.TASK_PROBE, names.KIND_PROBE, order)


def kill_stale_attempt(node: Node, *, attempt_id: str, fence: str) -> bool:
    """Kill an attempt on a node that was abandoned while the node was unreachable."""
    order = ControlOrder(attempt_id=attempt_id, fence=fence, action="kill", grace_s=0.0)
    return _send_one(node, names.TASK_CONTROL, names.KIND_CONTROL, order)


def _send_one(node: Node, task: str, kind: str, message: WireContract) -> bool:
    order = _seal(node, task, kind, message)
    return order is not None and _send([order])


def _seal(node: Node, task: str, kind: str, message: WireContract) -> celery_client.Order | None:
    """The order in the node's version, sealed for it; None if it may not or cannot be sent.

    A node whose version is refused gets no new work; requests to running attempts are still sent.
    """
    judgment = fleet.compatibility(node)
    if judgment.skew is versions.Skew.REFUSED and kind != names.KIND_CONTROL:
        log.warning("The %s order for %s was not sent: %s", kind, node.name, judgment.message)
        return None
    wire = fleet.peer(node).wire or versions.FIRST
    try:
        text = envelope.seal(
            fleet.node_secret(node),
            kind,
            message_for(message, wire),
            ttl_s=names.ORDER_TTL_S,
            now=time.time() + node.clock_skew_s,  # the node judges the expiry by its own clock
            node=node.name,
        )
    except ValueError as error:
        log.warning("The %s order for %s could not be sealed: %s", kind, node.name, error)
        return None
    return celery_client.Order(task, node.name, text)


def _send(orders: Sequence[celery_client.Order]) -> bool:
    if not orders:
        return True
    try:
        celery_client.send(orders)
    except (KombuError, RedisError, OSError, ValueError) as error:
        log.warning(
            "%s orders, the first for %s, were not sent at %s and will be repeated: %s",
            len(orders),
            orders[0].node,
            clock.now(),
            error,
        )
        return False
    return True
