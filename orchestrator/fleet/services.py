"""Changes nodes and devices: join, heartbeat, silence, drain.

A node's secret is derived from the join token's key and two nonces; neither is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional, live
from orchestrator.common.errors import Refusal, invalid
from orchestrator.common.redis import wake_scheduler
from orchestrator.fleet import selectors
from orchestrator.fleet.models import Cluster, Device, JoinToken, Node, Pool
from workers.contracts.wire import envelope
from workers.contracts.wire.node_messages import DeviceInfo, DeviceSample, NodeInventory

JOIN_TOKEN_LIFE = timedelta(hours=24)
DEFAULT = "default"


class HealthChanges(NamedTuple):
    """Nodes that became silent or lost."""

    silent: list[Node]
    lost: list[Node]


def join_token_create(
    *, by: User | None, pool: str | None = None, expires: datetime | None = None
) -> str:
    """The text of a new single-use token for joining the pool, valid for a day by default."""
    if by is not None:
        accounts.require_role(by, Role.OPERATOR, "create join tokens")
    now = clock.now()
    if expires is not None and expires <= now:
        raise invalid("expires", "the time is in the past", "a later time, or none")
    token_id = envelope.join_token_new()[0]
    with transaction.atomic():
        JoinToken.objects.create(
            id=token_id,
            pool=pool_ensure(pool or DEFAULT),
            created=now,
            created_by=by.username if by else "system",
            expires=expires or now + JOIN_TOKEN_LIFE,
        )
        accounts.audit(
            actor=by,
            action="join_token.create",
            target=f"join:{token_id}",
            data={"pool": pool or DEFAULT},
        )
    return f"{token_id}.{selectors.join_key(token_id).decode()}"


def pool_ensure(name: str) -> Pool:
    """The pool with this name; created if it does not exist."""
    if not name or len(name) > 80:
        raise invalid("pool", "a pool's name has 1 to 80 characters", DEFAULT)
    return Pool.objects.get_or_create(name=name)[0]


def node_joined(
    *, request: Mapping[str, Any], inventory: NodeInventory
) -> tuple[Node, dict[str, str]]:
    """Register a node, or re-register it under its name: `(node, reply)`.

    The reply's nonce completes the node's secret. `request` is from `envelope.join_request`. A
    token works once; an identical request, from a stream that is read twice, gets the same reply.
    Raises 403 with the reason.
    """
    token_id = str(request.get("id", ""))
    key = selectors.join_key(token_id)
    try:
        reply, _ = envelope.join_reply(key, dict(request), node=inventory.name)
    except envelope.EnvelopeError as error:
        raise _refused(str(error)) from None
    if request["name"] != inventory.name:
        raise _refused(
            f"The request is from {request['name']!r}, the inventory from {inventory.name!r}."
        )
    if len(request["nonce_a"]) > 64:
        raise _refused("The nonce has more than 64 characters.")
    now = clock.now()
    with transaction.atomic():
        token = JoinToken.objects.select_related("pool", "node").filter(pk=token_id).first()
        if token is None:
            raise _refused("The join token does not exist. Create a new one.")
        fresh = JoinToken.objects.filter(pk=token_id, used=None, expires__gt=now)
        if not conditional.update(fresh, used=now):
            return _repeat_reply(token, key, request, now)
        node = _register(inventory, token.pool, now)
        node.join_token_id = token_id
        node.join_nonces = f"{request['nonce_a']} {reply['nonce_b']}"
        node.save(update_fields=["join_token_id", "join_nonces"])
        JoinToken.objects.filter(pk=token_id).update(node=node)
        accounts.audit(
            actor=None,
            action="node.join",
            target=f"node:{node.name}",
            data={"pool": token.pool.name},
        )
        _publish(node)
        wake_scheduler()
    return node, reply


def node_heartbeat(
    *,
    node: Node,
    samples: Sequence[DeviceSample] = (),
    inventory: NodeInventory | None = None,
    now: datetime | None = None,
) -> bool:
    """Record a heartbeat with its device readings; True if the node was silent or lost, or changed.

    One UPDATE and one frame; writes device rows only with a new inventory.
    """
    now = now or clock.now()
    readings = [sample.to_dict() for sample in samples]
    with transaction.atomic():
        back = conditional.update(
            Node.objects.filter(pk=node.pk).exclude(health=Node.Health.UP), health=Node.Health.UP
        )
        changes: dict[str, Any] = {"last_heartbeat": now}
        if readings:
            changes["sample"] = {"time": now.timestamp(), "devices": readings}
        Node.objects.filter(pk=node.pk).update(**changes)
        for name, value in changes.items():
            setattr(node, name, value)
        node.health = Node.Health.UP
        if inventory is not None and inventory.to_dict() != node.inventory:
            _apply_inventory(node, inventory)
            back = True
        if readings:
            live.append("fleet", "sample", {"node": node.name, "devices": readings})
        if back:
            _publish(node)
            wake_scheduler()
    return back


def mark_silent(*, now: datetime, listening_since: datetime | None = None) -> HealthChanges:
    """Mark nodes without heartbeat as silent, later as lost; returns the changed nodes.

    `listening_since`: heartbeats are read since then; earlier silence does not count.
    """
    silent_from = now - timedelta(seconds=settings.ENV.node_silent_s)
    lost_from = now - timedelta(seconds=settings.ENV.node_lost_s)
    changes = HealthChanges([], [])
    for health, moved, since, nodes in (
        (Node.Health.UP, Node.Health.SILENT, silent_from, changes.silent),
        (Node.Health.SILENT, Node.Health.LOST, lost_from, changes.lost),
    ):
        if listening_since is not None and listening_since > since:
            continue
        for node in Node.objects.filter(health=health, last_heartbeat__lt=since):
            with transaction.atomic():
                quiet = Node.objects.filter(pk=node.pk, health=health, last_heartbeat__lt=since)
                if conditional.update(quiet, health=moved):
                    node.health = moved
                    nodes.append(node)
                    _publish(node)
    return changes


def node_drain(*, node: Node, by: User, reason: str = "") -> Node:
    """Start nothing new on the node; running attempts continue. A repeat updates the reason."""
    accounts.require_role(by, Role.OPERATOR, "drain nodes")
    return _set_drained(node, by, True, reason.strip()[:200])


def node_undrain(*, node: Node, by: User) -> Node:
    """Let the node accept work again."""
    accounts.require_role(by, Role.OPERATOR, "undrain nodes")
    return _set_drained(node, by, False, "")


def _set_drained(node: Node, by: User, drained: bool, reason: str) -> Node:
    with transaction.atomic():
        Node.objects.filter(pk=node.pk).update(drained=drained, drain_reason=reason)
        action = "node.drain" if drained else "node.undrain"
        accounts.audit(
            actor=by,
            action=action,
            target=f"node:{node.name}",
            data={"reason": reason} if reason else {},
        )
        node.refresh_from_db()
        _publish(node)
        wake_scheduler()
    return node


def _register(inventory: NodeInventory, pool: Pool, now: datetime) -> Node:
    cluster = Cluster.objects.get_or_create(name=DEFAULT)[0]
    node, _ = Node.objects.update_or_create(
        name=inventory.name,
        defaults={
            "pool": pool,
            "address": inventory.address,
            "hostname": inventory.hostname,
            "health": Node.Health.UP,
            "joined": now,
            "last_heartbeat": now,
        },
        create_defaults={
            "cluster": cluster,
            "pool": pool,
            "address": inventory.address,
            "hostname": inventory.hostname,
            "joined": now,
            "last_heartbeat": now,
        },
    )
    _apply_inventory(node, inventory)
    return node


def _apply_inventory(node: Node, inventory: NodeInventory) -> None:
    """Update the node's row and devices; missing devices stay as unhealthy, for their history."""
    node.inventory, node.address, node.hostname = (
        inventory.to_dict(),
        inventory.address,
        inventory.hostname,
    )
    node.save(update_fields=["inventory", "address", "hostname"])
    known = {device.index: device for device in Device.objects.filter(node=node)}
    new, changed = [], []
    for info in inventory.devices:
        values = _device_values(info)
        device = known.pop(info.index, None)
        if device is None:
            new.append(Device(node=node, index=info.index, **values))
        elif any(getattr(device, name) != value for name, value in values.items()):
            for name, value in values.items():
                setattr(device, name, value)
            changed.append(device)
    for device in known.values():
        device.healthy = False
        changed.append(device)
    Device.objects.bulk_create(new)
    if changed:
        Device.objects.bulk_update(
            changed, ["kind", "name", "catalogue", "memory_bytes", "uuid", "healthy"]
        )


def _device_values(info: DeviceInfo) -> dict[str, Any]:
    return {
        "kind": info.kind,
        "name": info.name[:120],
        "catalogue": info.catalogue or "",
        "memory_bytes": info.memory_bytes,
        "uuid": (info.uuid or "")[:80],
        "healthy": True,
    }


def _repeat_reply(
    token: JoinToken, key: bytes, request: Mapping[str, Any], now: datetime
) -> tuple[Node, dict[str, str]]:
    """The reply for a used token: the same reply for an identical request, else a refusal."""
    node = token.node
    if node is not None and node.join_token_id == token.pk:
        nonce_a, nonce_b = node.join_nonces.split(" ")
        if (nonce_a, node.name) == (request["nonce_a"], request["name"]):
            return node, envelope.join_reply(key, dict(request), node=node.name, nonce_b=nonce_b)[0]
    if token.used is not None:
        raise _refused("The join token was used before; it is single-use. Create a new one.")
    raise _refused(f"The join token expired {now - token.expires} ago. Create a new one.")


def _refused(detail: str) -> Refusal:
    return Refusal("join-refused", "The node may not join", 403, detail)


def _publish(node: Node) -> None:
    live.append(
        "fleet", "node", {"node": node.name, "health": str(node.health), "drained": node.drained}
    )
