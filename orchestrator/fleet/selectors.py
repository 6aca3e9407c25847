"""Reads nodes, devices and pools, and derives secrets. Who logs in sees the whole fleet."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Count, Q, QuerySet

from orchestrator.accounts.models import User
from orchestrator.common.errors import not_found
from orchestrator.common.units import is_id, iso
from orchestrator.fleet.models import Device, Node, Pool
from workers.contracts.wire import envelope


def nodes_visible_to(*, user: User) -> QuerySet[Node]:
    """By name, with their devices, cluster and pool at hand."""
    nodes = (
        Node.objects.order_by("name").select_related("cluster", "pool").prefetch_related("devices")
    )
    return nodes if user.is_active else nodes.none()


def devices_visible_to(*, user: User) -> QuerySet[Device]:
    """By node and index, with their node at hand."""
    devices = Device.objects.order_by("node__name", "index").select_related("node", "node__pool")
    return devices if user.is_active else devices.none()


def node_get(*, user: User, id: int | str) -> Node:
    """By number or by name. Raises 404."""
    named = Q(name=str(id))
    node = nodes_visible_to(user=user).filter(named | Q(pk=int(id)) if is_id(id) else named).first()
    if node is None:
        raise not_found("node", id)
    return node


def node_named(name: str) -> Node | None:
    """For news from nodes: the node that an envelope claims to be from."""
    return Node.objects.filter(name=name).first()


def pools() -> QuerySet[Pool]:
    """By priority, with `node_count` and `device_count` (healthy devices of nodes that take work)."""
    serving = Q(nodes__devices__healthy=True, nodes__health=Node.Health.UP, nodes__drained=False)
    return Pool.objects.order_by("-priority", "name").annotate(
        node_count=Count("nodes", distinct=True),
        device_count=Count("nodes__devices", filter=serving, distinct=True),
    )


def capacity() -> int:
    """Healthy devices of the whole fleet, whatever their nodes' present health."""
    return Device.objects.filter(healthy=True).count()


@dataclass(frozen=True)
class Offer:
    """What a pool has of one kind of device: the least memory among them, the most on one node, how
    many in all.

    `cores` are the fewest of a node that has `per_node` of them: CPU slots may be more than there
    are cores.
    """

    catalogue: str
    memory_bytes: int
    per_node: int
    devices: int
    cores: int


def offer(*, pool: str, catalogue: str | None = None) -> Offer | None:
    """The kind of healthy device that the pool has most of, or the named kind; None where it has
    none it knows.
    """
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
    """The secret part of a join token: derived from the server's key, so that none is stored."""
    key = settings.SECRET_KEY.encode()
    return hmac.new(key, f"join:{token_id}".encode(), hashlib.sha256).hexdigest().encode()


def node_secret(node: Node) -> bytes:
    """What seals every envelope from and to the node.

    Raises ValueError for a node that never joined.
    """
    nonces = node.join_nonces.split(" ")
    if not node.join_token_id or len(nonces) != 2:
        raise ValueError(f"{node.name} has not joined; start its agent with a join token.")
    return envelope.node_secret(join_key(node.join_token_id), *nonces)


def node_answer(node: Node) -> dict[str, Any]:
    """The REST shape of a node, devices included."""
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
        "devices": [device_answer(device, node) for device in node.devices.all()],
    }


def device_answer(device: Device, node: Node | None = None) -> dict[str, Any]:
    """The REST shape of a device with its newest reading, null before the first."""
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
