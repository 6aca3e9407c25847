"""Changes nodes and devices: join, inventory, drain. Heartbeats and losses are in `node_health`.

A node's secret is derived from the join token's key and two nonces; neither is stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional, live
from orchestrator.common.errors import Refusal, invalid
from orchestrator.common.redis import wake_scheduler
from orchestrator.fleet import broker_users, selectors
from orchestrator.fleet.models import Cluster, Device, JoinToken, Node, Pool
from workers.contracts import topology_path
from workers.contracts.wire import envelope, versions
from workers.contracts.wire.cluster_engines.jobs import is_member_name
from workers.contracts.wire.node_messages import DeviceInfo, NodeInventory

JOIN_TOKEN_LIFE = timedelta(hours=24)
DEFAULT = "default"
_READ_S = 5.0  # for reading what a node sent before it is removed


def join_token_create(
    *, by: User | None, pool: str | None = None, expires: datetime | None = None
) -> str:
    """The text of a new single-use token for joining the pool, valid for a day by default.

    Raises 403, 422 for a time in the past.
    """
    if by is not None:
        accounts.require_role(by, Role.OPERATOR, "create join tokens")
    now = clock.now()
    if expires is not None and expires <= now:
        raise invalid("expires", "the time is in the past", "Use a later time, or omit the field.")
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
    """The pool with this name; created if it does not exist. Raises 422 for an invalid name."""
    if not name or len(name) > 80:
        raise invalid("pool", "a pool's name has 1 to 80 characters", f"Use {DEFAULT}.")
    return Pool.objects.get_or_create(name=name)[0]


def node_joined(
    *,
    request: Mapping[str, Any],
    inventory: NodeInventory,
    peer: versions.PeerVersion = versions.OWN,
) -> tuple[Node, dict[str, str]]:
    """Register a node, or re-register it under its name: `(node, reply)`.

    The reply's nonce completes the node's secret. `request` is from `envelope.join_request`. A
    token works once; an identical request, from a stream that is read twice, gets the same reply.
    `peer` has the versions of the node's agent. Raises 403 with the reason.
    """
    judgment = versions.judge(peer, name=f"node {inventory.name}")
    if judgment.skew is versions.Skew.REFUSED:  # before the token is used
        raise Refusal("node-incompatible", "The node may not join", 403, str(judgment))
    token_id = str(request.get("id", ""))
    server_key, key, reply = _answer_request(request, inventory)
    if request["name"] != inventory.name:
        raise _refused(
            f"The request is from {request['name']!r}, the inventory from {inventory.name!r}."
        )
    if is_member_name(inventory.name):
        raise _refused(f"{inventory.name!r} is a name of jobs of other engines. Set --name.")
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
        node.join_key_id = selectors.key_id(server_key)
        node.release, node.wire = peer.release, str(peer.wire or "")
        node.save(update_fields=["join_token_id", "join_nonces", "join_key_id", "release", "wire"])
        JoinToken.objects.filter(pk=token_id).update(node=node)
        accounts.audit(
            actor=None,
            action="node.join",
            target=f"node:{node.name}",
            data={"pool": token.pool.name},
        )
        publish(node)
        wake_scheduler()
    return node, reply


def _answer_request(
    request: Mapping[str, Any], inventory: NodeInventory
) -> tuple[str, bytes, dict[str, str]]:
    """`(server key, the token's key, reply)`; the token may be older than the server's key."""
    refusal: envelope.EnvelopeError | None = None
    for server_key in selectors.server_keys():
        key = selectors.join_key(str(request.get("id", "")), server_key)
        try:
            reply, _ = envelope.join_reply(key, dict(request), node=inventory.name)
        except envelope.EnvelopeError as error:
            refusal = refusal or error
        else:
            return server_key, key, reply
    raise _refused(str(refusal))


def node_close(*, node: Node, by: User) -> int:
    """End the access of a node that will be removed, and wait until its messages are read.

    Returns how many are not read after 5 s. Raises 403.
    """
    accounts.require_role(by, Role.OPERATOR, "remove nodes")
    return broker_users.close_node(node.name, patience_s=_READ_S)


def node_remove(*, node: Node, by: User, unread: int = 0) -> None:
    """Delete the node with its devices and their history; its messages are dropped from then on.

    Its secret and join token are void. The caller checks that no attempt is on it, and keeps
    allocations. `unread` messages of it are lost.
    """
    accounts.require_role(by, Role.OPERATOR, "remove nodes")
    with transaction.atomic():
        accounts.audit(
            actor=by,
            action="node.remove",
            target=f"node:{node.name}",
            data={"address": node.address, "pool": node.pool.name, "unread_messages": unread},
        )
        Node.objects.filter(pk=node.pk).delete()
        name = node.name
        transaction.on_commit(lambda: broker_users.remove_node(name), robust=True)
        live.append("fleet", "node", {"node": node.name, "removed": True})
        wake_scheduler()


def node_drain(*, node: Node, by: User, reason: str = "") -> Node:
    """Start nothing new on the node; running attempts continue. A repeat updates the reason."""
    accounts.require_role(by, Role.OPERATOR, "drain nodes")
    return _set_drained(node, by, True, reason.strip()[:200])


def node_undrain(*, node: Node, by: User) -> Node:
    """Let the node accept work again."""
    accounts.require_role(by, Role.OPERATOR, "undrain nodes")
    return _set_drained(node, by, False, "")


def node_topology_set(*, node: Node, by: User, path: str) -> Node:
    """Set the node's path in the tree of switches (`row-1/rack-3`); empty: unknown. Raises 403.

    Gangs over several nodes get nodes that are close. Raises 422 for a path that is too long.
    """
    accounts.require_role(by, Role.OPERATOR, "set the topology of nodes")
    try:
        text = topology_path.path(path)
    except ValueError as error:
        raise invalid("path", str(error), "Use a place such as row-1/rack-3.") from None
    with transaction.atomic():
        Node.objects.filter(pk=node.pk).update(topology=text)
        accounts.audit(
            actor=by, action="node.topology", target=f"node:{node.name}", data={"path": text}
        )
        node.refresh_from_db()
        publish(node)
        wake_scheduler()
    return node


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
        publish(node)
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
    apply_inventory(node, inventory)
    return node


def apply_inventory(node: Node, inventory: NodeInventory) -> None:
    """Update the node's row and devices; missing devices stay as unhealthy, for their history.

    A new topology of the agent replaces the node's; until it changes, an operator's remains.
    """
    if inventory.topology is not None and inventory.topology != node.inventory.get("topology"):
        with contextlib.suppress(ValueError):  # the agent refuses such a path
            node.topology = topology_path.path(inventory.topology)
    node.inventory, node.address, node.hostname = (
        inventory.to_dict(),
        inventory.address,
        inventory.hostname,
    )
    node.save(update_fields=["inventory", "address", "hostname", "topology"])
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
        device.problem = "The node no longer reports this device."
        changed.append(device)
    Device.objects.bulk_create(new)
    if changed:
        Device.objects.bulk_update(
            changed, ["kind", "name", "catalogue", "memory_bytes", "uuid", "healthy", "problem"]
        )


def _device_values(info: DeviceInfo) -> dict[str, Any]:
    return {
        "kind": info.kind,
        "name": info.name[:120],
        "catalogue": info.catalogue or "",
        "memory_bytes": info.memory_bytes,
        "uuid": (info.uuid or "")[:80],
        "healthy": info.problem is None,
        "problem": (info.problem or "")[:200],
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


def publish(node: Node) -> None:
    """Send the node's health to pages when the transaction commits."""
    live.append(
        "fleet",
        "node",
        {
            "node": node.name,
            "health": str(node.health),
            "drained": node.drained,
            "loss_held": node.loss_held,
        },
    )
