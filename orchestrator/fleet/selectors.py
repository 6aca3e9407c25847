"""Reads nodes, devices and pools; derives node secrets. All active users see the whole fleet."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Count, Q, QuerySet

from orchestrator.accounts.models import User
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.fleet.models import Device, Node, Pool
from workers.contracts.wire import envelope


def nodes_visible_to(*, user: User) -> QuerySet[Node]:
    """Nodes by name; prefetches devices, cluster and pool."""
    nodes = (
        Node.objects.order_by("name").select_related("cluster", "pool").prefetch_related("devices")
    )
    return nodes if user.is_active else nodes.none()


def devices_visible_to(*, user: User) -> QuerySet[Device]:
    """Devices by node and index; selects the node."""
    devices = Device.objects.order_by("node__name", "index").select_related("node", "node__pool")
    return devices if user.is_active else devices.none()


def node_get(*, user: User, id: int | str) -> Node:
    """The node with this id or name. Raises 404."""
    named = Q(name=str(id))
    node = nodes_visible_to(user=user).filter(named | Q(pk=int(id)) if is_id(id) else named).first()
    if node is None:
        raise missing_object("node", id)
    return node


def node_named(name: str) -> Node | None:
    """The node that an envelope names as its sender."""
    return Node.objects.filter(name=name).first()


def pools() -> QuerySet[Pool]:
    """Pools by priority, with `node_count` and `device_count` (healthy, accepting work)."""
    serving = Q(nodes__devices__healthy=True, nodes__health=Node.Health.UP, nodes__drained=False)
    return Pool.objects.order_by("-priority", "name").annotate(
        node_count=Count("nodes", distinct=True),
        device_count=Count("nodes__devices", filter=serving, distinct=True),
    )


def capacity() -> int:
    """Number of healthy devices of the fleet, independent of node health."""
    return Device.objects.filter(healthy=True).count()


@dataclass(frozen=True)
class Offer:
    """A pool's devices of one type: minimum memory, maximum per node, total.

    `cores`: the minimum of nodes with `per_node` devices; there may be more CPU slots than cores.
    """

    catalogue: str
    memory_bytes: int
    per_node: int
    devices: int
    cores: int


def offer(*, pool: str, catalogue: str | None = None) -> Offer | None:
    """The pool's most frequent healthy device type, or the named one; null if unknown."""
    devices = Device.objects.filter(healthy=True, node__pool__name=pool).exclude(catalogue="")
    if catalogue is not None:
        devices = devices.filter(catalogue=catalogue)
    rows = list(
        devices.order_by("id").values_list(
            "catalogue", "memory_bytes", "node_id", "node__inventory__cores"
        )
    )
    if not rows:
        return None
    kind = Counter(name for name, *_ in rows).most_common(1)[0][0]
    rows = [row for row in rows if row[0] == kind]
    on_node = Counter(node for _, _, node, _ in rows)
    most = max(on_node.values())
    cores = [
        number for _, _, node, number in rows if on_node[node] == most and isinstance(number, int)
    ]
    return Offer(
        kind, min(size for _, size, _, _ in rows), most, len(rows), min(cores, default=most)
    )


def join_key(token_id: str) -> bytes:
    """The secret part of a join token, derived from the server's key."""
    key = settings.SECRET_KEY.encode()
    return hmac.new(key, f"join:{token_id}".encode(), hashlib.sha256).hexdigest().encode()


def node_secret(node: Node) -> bytes:
    """The key of all envelopes from and to the node. ValueError for a node that never joined."""
    nonces = node.join_nonces.split(" ")
    if not node.join_token_id or len(nonces) != 2:
        raise ValueError(f"{node.name} has not joined; start its agent with a join token.")
    return envelope.node_secret(join_key(node.join_token_id), *nonces)


def serialize_node(node: Node) -> dict[str, Any]:
    """The REST representation of a node with its devices."""
    return {
        "id": str(node.pk),
        "name": node.name,
        "cluster": node.cluster.name,
        "pool": node.pool.name,
        "address": node.address,
        "hostname": node.hostname,
        "health": node.health,
        "drained": node.drained,
        "drain_reason": node.drain_reason,
        "joined": iso(node.joined),
        "last_heartbeat": iso(node.last_heartbeat),
        "cores": node.inventory.get("cores"),
        "memory_bytes": node.inventory.get("memory_bytes"),
        "versions": node.inventory.get("versions", {}),
        "devices": [serialize_device(device, node) for device in node.devices.all()],
    }


def serialize_device(device: Device, node: Node | None = None) -> dict[str, Any]:
    """The REST representation of a device with its newest reading, null before the first."""
    node = node or device.node
    readings = node.sample.get("devices", [])
    return {
        "id": str(device.pk),
        "node": node.name,
        "index": device.index,
        "kind": device.kind,
        "name": device.name,
        "catalogue": device.catalogue or None,
        "memory_bytes": device.memory_bytes,
        "uuid": device.uuid or None,
        "healthy": device.healthy,
        "sample": next(
            (reading for reading in readings if reading.get("index") == device.index), None
        ),
    }
