"""Health of nodes: records heartbeats, marks silent and lost nodes, holds mass losses.

Does not depend on how heartbeats arrive or what the loss of a node ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connection, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional, live
from orchestrator.common.errors import Refusal
from orchestrator.common.redis import wake_scheduler
from orchestrator.fleet import selectors
from orchestrator.fleet.models import Node
from orchestrator.fleet.services import apply_inventory, publish
from workers.contracts.wire import versions
from workers.contracts.wire.node_messages import NodeInventory

LOSS_WINDOW = timedelta(minutes=10)  # in which at most a share of the fleet may be lost
_HEARTBEAT = (
    "UPDATE fleet_node SET last_heartbeat = %s, sample = %s, clock_skew_s = %s, release = %s,"
    " wire = %s WHERE id = %s"
)
# the same for many nodes in one statement, with one parameter: psycopg quotes each text of an array
# with a regular expression, which took 40% of a heartbeat's time
_HEARTBEATS = (
    "UPDATE fleet_node AS node SET last_heartbeat = to_timestamp(new.time), sample = new.sample,"
    " clock_skew_s = new.skew, release = new.release, wire = new.wire"
    " FROM jsonb_to_recordset(%s::jsonb)"
    " AS new(time float8, sample jsonb, skew float8, release text, wire text, id int8)"
    " WHERE node.id = new.id"
)


class HealthChanges(NamedTuple):
    """Nodes that became silent or lost, and overdue ones whose loss is held.

    `unreachable`: overdue, but attempts on them still renew their leases.
    """

    silent: list[Node]
    lost: list[Node]
    held: list[Node]
    unreachable: list[Node]


@dataclass(frozen=True)
class NodeBeat:
    """One verified heartbeat; `time` is its arrival in Unix seconds of this machine's clock.

    `samples` is the JSON list of device readings, which is stored and published as it is. `peer`
    has the agent's versions, `supervisors` the `(release, wire)` of each that differs.
    """

    node: selectors.Sender
    time: float
    samples: str = "[]"
    clock_skew_s: float = 0.0
    inventory: NodeInventory | None = None
    peer: versions.PeerVersion = versions.OWN
    supervisors: Sequence[tuple[str, str]] = ()
    dropped_orders: int = 0


def heartbeats_record(*, beats: Sequence[NodeBeat]) -> bool:
    """Record heartbeats of different nodes together; True if one is back or has changed.

    One transaction, with one statement on PostgreSQL, and one live frame; writes device rows only
    with a new inventory.
    """
    back = False
    with transaction.atomic():
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(_HEARTBEATS, [f"[{','.join(map(_record, beats))}]"])
            else:
                cursor.executemany(_HEARTBEAT, [_row(beat) for beat in beats])
        for beat in beats:
            if beat.node.health != Node.Health.UP or beat.node.loss_held:
                back = _node_back(beat.node.pk) or back
            if _versions(beat) != (beat.node.release, beat.node.wire):
                publish(Node.objects.get(pk=beat.node.pk))
                back = True
            if beat.inventory is not None:
                back = _inventory_changed(beat.node.pk, beat.inventory) or back
        if back:
            wake_scheduler()
    readings = [
        f'{{"node":{json.dumps(beat.node.name)},"devices":{beat.samples}}}'
        for beat in beats
        if beat.samples != "[]"
    ]
    if readings:
        live.announce("fleet", "samples", f'{{"nodes":[{",".join(readings)}]}}')
    return back


def _record(beat: NodeBeat) -> str:
    release, wire = _versions(beat)
    row = {
        "id": beat.node.pk,
        "time": beat.time,
        "skew": beat.clock_skew_s,
        "release": release,
        "wire": wire,
    }
    return f'{json.dumps(row)[:-1]},"sample":{_sample(beat)}}}'


def _row(beat: NodeBeat) -> tuple[Any, ...]:
    time = connection.ops.adapt_datetimefield_value(clock.from_unix(beat.time))
    return (time, _sample(beat), beat.clock_skew_s, *_versions(beat), beat.node.pk)


def _sample(beat: NodeBeat) -> str:
    """`{time, supervisors?, dropped_orders?, devices}` as JSON; readings are long."""
    sample: dict[str, Any] = {"time": beat.time}
    if beat.supervisors:
        sample["supervisors"] = list(beat.supervisors)
    if beat.dropped_orders:
        sample["dropped_orders"] = beat.dropped_orders
    return f'{json.dumps(sample)[:-1]},"devices":{beat.samples}}}'


def _versions(beat: NodeBeat) -> tuple[str, str]:
    """As stored; a version that cannot be read is stored as empty text."""
    return beat.peer.release, str(beat.peer.wire or "")


def _node_back(pk: int) -> bool:
    """Mark a silent or lost node as up; False if it is up already."""
    gone = Node.objects.filter(pk=pk).exclude(health=Node.Health.UP)
    back = conditional.update(gone, health=Node.Health.UP, lost_at=None)
    Node.objects.filter(pk=pk).update(loss_held=False, loss_confirmed=False)
    if back:
        publish(Node.objects.get(pk=pk))
    return back


def _inventory_changed(pk: int, inventory: NodeInventory) -> bool:
    node = Node.objects.get(pk=pk)
    if inventory.to_dict() == node.inventory:
        return False
    apply_inventory(node, inventory)
    publish(node)
    return True


def mark_lost_nodes(
    *, silence: Callable[[str], float], occupied: Collection[str] = (), may_lose: bool = True
) -> HealthChanges:
    """Mark nodes without heartbeat as silent, later as lost; returns what changed.

    `silence` is the seconds without heartbeat of a node. `occupied` nodes still run attempts
    although their agents are silent: they stay silent. Nothing is lost unless `may_lose`. If more
    than a share of the fleet would be lost within LOSS_WINDOW, an operator must confirm it first:
    such nodes are `held`.
    """
    changes = HealthChanges([], [], [], [])
    nodes = list(Node.objects.order_by("name"))
    for node in nodes:
        quiet = node.health == Node.Health.UP and silence(node.name) >= settings.ENV.node_silent_s
        if quiet and _move(node, Node.Health.SILENT):
            changes.silent.append(node)
    lost_s = settings.ENV.node_lost_s
    overdue = [
        node for node in nodes if node.health == Node.Health.SILENT and silence(node.name) >= lost_s
    ]
    if not may_lose:
        return changes
    since = clock.now() - LOSS_WINDOW
    recent = sum(node.lost_at is not None and node.lost_at >= since for node in nodes)
    free = max(1, int(settings.ENV.lost_share * len(nodes))) - recent
    held = len(overdue) > free
    for node in overdue:
        if held and not node.loss_confirmed:
            changes.held.append(node)
        elif node.name in occupied:
            changes.unreachable.append(node)
        elif _move(node, Node.Health.LOST):
            changes.lost.append(node)
    _hold(nodes, {node.pk for node in changes.held})
    return changes


def _move(node: Node, health: Node.Health) -> bool:
    """Move a node to a worse health; False if it changed meanwhile."""
    with transaction.atomic():
        row = Node.objects.filter(pk=node.pk, health=node.health)
        values: dict[str, Any] = {"health": health}
        if health == Node.Health.LOST:
            values |= {"lost_at": clock.now(), "loss_held": False, "loss_confirmed": False}
        if not conditional.update(row, **values):
            return False
        node.health = health
        publish(node)
    return True


def _hold(nodes: Sequence[Node], held: Collection[int]) -> None:
    """Store which nodes wait for confirmation."""
    for node in nodes:
        if node.loss_held != (node.pk in held):
            node.loss_held = node.pk in held
            Node.objects.filter(pk=node.pk).update(loss_held=node.loss_held)
            publish(node)


def node_confirm_lost(*, node: Node, by: User) -> Node:
    """Confirm that a silent node is lost: its attempts end and their runs start elsewhere.

    Raises 403 for users who are not operators, 409 for a node that is not overdue.
    """
    accounts.require_role(by, Role.OPERATOR, "confirm that nodes are lost")
    with transaction.atomic():
        if not conditional.update(
            Node.objects.filter(pk=node.pk, loss_held=True), loss_confirmed=True
        ):
            raise Refusal(
                "node-not-overdue",
                "The node is not waiting for confirmation",
                409,
                f"{node.name} is {node.health}. Only a node whose loss is held can be confirmed.",
            )
        accounts.audit(actor=by, action="node.confirm_lost", target=f"node:{node.name}", data={})
        node.refresh_from_db()
        wake_scheduler()
    return node
