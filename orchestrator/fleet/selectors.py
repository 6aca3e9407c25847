"""Reads nodes, devices and pools; derives node secrets. All active users see the whole fleet."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from django.conf import settings
from django.db.models import Count, Q, QuerySet

from orchestrator.accounts.models import User
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.fleet import cordons
from orchestrator.fleet.cluster_engines import members
from orchestrator.fleet.models import Cordon, Device, EngineMember, Node, Pool
from workers.contracts.wire import envelope, versions
from workers.contracts.wire.cluster_engines.jobs import is_member_name
from workers.contracts.wire.node_messages import supported


def nodes_visible_to(*, user: User, devices: bool = True) -> QuerySet[Node]:
    """Nodes by name; prefetches `devices`, open cordons, cluster and pool."""
    nodes = Node.objects.order_by("name").select_related("cluster", "pool")
    if devices:
        nodes = nodes.prefetch_related("devices")
    return cordons.with_open_cordons(nodes) if user.is_active else nodes.none()


class NodeFacts(NamedTuple):
    """A node in a list of the full fleet; `devices` counts all, `unusable` those without service.

    `unusable` devices are unhealthy or have a cordon of their own.
    """

    id: int
    name: str
    health: str
    drained: bool
    pool: str
    skew: versions.Skew
    cordoned: bool
    devices: int
    unusable: int

    @property
    def in_trouble(self) -> bool:
        """Whether the node or one of its devices gets no new work."""
        refused = self.skew is versions.Skew.REFUSED
        down = self.health != Node.Health.UP
        return down or self.drained or self.cordoned or refused or self.unusable > 0


def node_facts(*, user: User) -> list[NodeFacts]:
    """All nodes by name, for a list; every active user sees them."""
    return all_node_facts() if user.is_active else []


def all_node_facts() -> list[NodeFacts]:
    """All nodes by name, without inventories and samples: four queries for any number."""
    cordoned = set(
        Cordon.objects.filter(lifted=None, device=None).values_list("node_id", flat=True)
    )
    totals = dict(Device.objects.values_list("node_id").annotate(Count("id")).order_by())
    bad = Device.objects.filter(Q(healthy=False) | cordons.has_open_cordon("device"))
    unusable = dict(bad.values_list("node_id").annotate(Count("id")).order_by())
    skews: dict[str, versions.Skew] = {}
    facts = []
    rows = Node.objects.order_by("name")
    for pk, name, health, drained, pool, wire in rows.values_list(
        "id", "name", "health", "drained", "pool__name", "wire"
    ):
        if wire not in skews:
            skews[wire] = versions.skew(versions.WIRE, versions.parse_wire(wire))
        facts.append(
            NodeFacts(
                pk,
                name,
                health,
                drained,
                pool,
                skews[wire],
                pk in cordoned,
                totals.get(pk, 0),
                unusable.get(pk, 0),
            )
        )
    return facts


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


def node_named(name: str) -> Node | EngineMember | None:
    """The node, or the supervisor in a job of an engine, that an envelope names as its sender."""
    if is_member_name(name):
        return members.member_named(name)
    return Node.objects.filter(name=name).first()


def node_names() -> list[str]:
    """The names of all senders: nodes, and supervisors in jobs of engines."""
    return [*Node.objects.values_list("name", flat=True), *members.member_names()]


def pools() -> QuerySet[Pool]:
    """Pools by priority, with `node_count` and `device_count` (usable now)."""
    cordoned = Node.objects.filter(cordons.has_open_cordon("node")).values("pk")
    devices = cordons.usable_devices().filter(node__health=Node.Health.UP, node__drained=False)
    serving = Q(nodes__devices__in=devices.exclude(node__in=cordoned).values("pk"))
    return Pool.objects.order_by("-priority", "name").annotate(
        node_count=Count("nodes", distinct=True),
        device_count=Count("nodes__devices", filter=serving, distinct=True),
    )


def capacity() -> int:
    """Number of usable devices of the fleet, independent of node health."""
    return cordons.usable_devices().count()


def unsupported_needs(*, pool: str, needs: Sequence[str]) -> list[str]:
    """Those of `Resources.needs` without which a node of the pool could start the run.

    Empty if a node supports them all, for a pool without nodes, and for pools of engines.
    """
    nodes = Node.objects.filter(pool__name=pool, pool__engine=None)
    offers = [
        supported(container, limits)
        for container, limits in nodes.values_list(
            "inventory__isolation__container", "inventory__isolation__limits"
        )
    ]
    if not offers:
        return []
    best = max(offers, key=lambda offer: sum(need in offer for need in needs))
    return [need for need in needs if need not in best]


def engine_of_pool(pool: str) -> str | None:
    """The name of the cluster engine that schedules the pool's runs; None for Orrery's own nodes.

    Also None for an unknown pool.
    """
    rows = Pool.objects.filter(name=pool, engine__isnull=False)
    return rows.values_list("engine__name", flat=True).first()


def catalogue_counts() -> list[tuple[str, str, int]]:
    """`(pool, name in the device catalogue, number of devices)`."""
    rows = Device.objects.values_list("node__pool__name", "catalogue").order_by()
    return list(rows.annotate(number=Count("pk")))


def device_count() -> int:
    """Number of devices of the fleet, usable or not."""
    return Device.objects.count()


@dataclass(frozen=True)
class PoolDevices:
    """A pool's devices of one type: minimum memory, maximum per node, total.

    `cores`: the minimum of nodes with `per_node` devices; there may be more CPU slots than cores.
    """

    catalogue: str
    memory_bytes: int
    per_node: int
    devices: int
    cores: int


def offer(*, pool: str, catalogue: str | None = None) -> PoolDevices | None:
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
    return PoolDevices(
        kind, min(size for _, size, _, _ in rows), most, len(rows), min(cores, default=most)
    )


def join_key(token_id: str, server_key: str = "") -> bytes:
    """The secret part of a join token, derived from the server's key; default: the current one."""
    key = (server_key or settings.SECRET_KEY).encode()
    return hmac.new(key, f"join:{token_id}".encode(), hashlib.sha256).hexdigest().encode()


def server_keys() -> list[str]:
    """The current server key, then the earlier ones of ORRERY_SECRET_KEY_FALLBACKS."""
    return [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]


@lru_cache(maxsize=64)
def key_id(server_key: str) -> str:
    """Identifies a server key without revealing it."""
    return hmac.new(server_key.encode(), b"key id", hashlib.sha256).hexdigest()[:16]


def node_secret(node: Node | EngineMember) -> bytes:
    """The key of all envelopes from and to the node.

    ValueError for a node that never joined, or under a server key that is not configured any more.
    """
    if isinstance(node, EngineMember):
        return members.member_secret(node)
    if not node.join_token_id:
        raise ValueError(f"{node.name} has not joined; start its agent with a join token.")
    secret = _secret(node.join_token_id, node.join_nonces, _key_of(node.join_key_id))
    if secret is None:
        raise ValueError(
            f"{node.name} joined under an earlier secret key. Add that key to "
            "ORRERY_SECRET_KEY_FALLBACKS, or let the node join again."
        )
    return secret


def _key_of(id: str) -> str:
    """The configured server key with this id, or ""; without id the current one."""
    if not id:
        return settings.SECRET_KEY
    return next((key for key in server_keys() if key_id(key) == id), "")


@dataclass(frozen=True)
class Sender:
    """What the control plane needs to know about the sender of a heartbeat."""

    pk: int
    name: str
    health: str
    loss_held: bool
    release: str
    wire: str
    secret: bytes


def senders(names: Collection[str]) -> list[Sender]:
    """The nodes of these names that have joined, in one query."""
    rows = Node.objects.filter(name__in=names).values_list(
        "pk",
        "name",
        "health",
        "loss_held",
        "release",
        "wire",
        "join_token_id",
        "join_nonces",
        "join_key_id",
    )
    keyed = [(row[:6], _secret(row[6], row[7], _key_of(row[8]))) for row in rows]
    return [Sender(*row, secret) for row, secret in keyed if secret is not None]


@lru_cache(maxsize=4096)
def _secret(token_id: str, nonces: str, server_key: str) -> bytes | None:
    """A node's secret; None if it never joined, or without the server's key."""
    parts = nonces.split(" ")
    if not token_id or len(parts) != 2 or not server_key:
        return None
    return envelope.node_secret(join_key(token_id, server_key), *parts)


def peer(node: Node) -> versions.PeerVersion:
    """The versions of the node's agent."""
    return versions.PeerVersion(node.release, versions.parse_wire(node.wire))


def compatibility(node: Node) -> versions.VersionCheck:
    """How far the node's agent differs from this control plane."""
    return versions.judge(peer(node), name=f"node {node.name}")


def old_supervisors(node: Node) -> list[dict[str, Any]]:
    """Supervisors on the node of other versions than this control plane's.

    `[{release, wire, attempts, skew}]` from the newest heartbeat, by version.
    """
    known = [versions.parse_peer(*pair) for pair in node.sample.get("supervisors", [])]
    return [
        {
            "release": one.release,
            "wire": str(one.wire or ""),
            "attempts": count,
            "skew": str(versions.skew(versions.WIRE, one.wire)),
        }
        for one, count in sorted(Counter(known).items(), key=lambda item: str(item[0]))
    ]


def dropped_orders(node: Node) -> int:
    """Unreadable messages that the node's agent dropped from its queue since it started."""
    return int(node.sample.get("dropped_orders") or 0)


def dropped_orders_total() -> int:
    """`dropped_orders` of all nodes."""
    rows = Node.objects.filter(sample__has_key="dropped_orders")
    return sum(int(count or 0) for count in rows.values_list("sample__dropped_orders", flat=True))


def serialize_nodes(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Nodes as `serialize_node`, their devices in one query without objects."""
    devices: dict[int, list[Any]] = {node.pk: [] for node in nodes}
    rows = Device.objects.filter(node__in=devices).order_by("node_id", "index")
    for row in rows.values_list(named=True):
        devices[row.node_id].append(row)
    return [serialize_node(node, devices[node.pk]) for node in nodes]


def serialize_node(node: Node, devices: Iterable[Any] | None = None) -> dict[str, Any]:
    """The REST representation of a node with its devices, read here unless they are given."""
    devices = node.devices.all() if devices is None else devices
    held = cordons.open_of(node)
    return {
        "id": str(node.pk),
        "name": node.name,
        "cluster": node.cluster.name,
        "pool": node.pool.name,
        "address": node.address,
        "hostname": node.hostname,
        "topology": node.topology,
        "health": node.health,
        "drained": node.drained,
        "drain_reason": node.drain_reason,
        "cordons": [cordons.serialize_cordon(cordon) for cordon in held],
        "joined": iso(node.joined),
        "last_heartbeat": iso(node.last_heartbeat),
        "clock_skew_s": round(node.clock_skew_s, 3),
        "release": node.release,
        "wire": node.wire,
        "compatibility": serialize_judgment(compatibility(node)),
        "supervisors": old_supervisors(node),
        "loss_held": node.loss_held,
        "dropped_orders": dropped_orders(node),
        "cores": node.inventory.get("cores"),
        "memory_bytes": node.inventory.get("memory_bytes"),
        "versions": node.inventory.get("versions", {}),
        "isolation": node.inventory.get("isolation"),
        "broker_user": node.inventory.get("broker_user"),
        "devices": [serialize_device(device, node) for device in devices],
    }


def serialize_judgment(judgment: versions.VersionCheck) -> dict[str, str]:
    """`{skew, message, hint}`."""
    return {"skew": str(judgment.skew), "message": judgment.message, "hint": judgment.hint}


def serialize_device(device: Any, node: Node | None = None) -> dict[str, Any]:
    """The REST representation of a device with its newest reading, null before the first."""
    node = node or device.node
    readings = node.sample.get("devices", [])
    return {
        "id": str(device.id),
        "node": node.name,
        "index": device.index,
        "kind": device.kind,
        "name": device.name,
        "catalogue": device.catalogue or None,
        "memory_bytes": device.memory_bytes,
        "uuid": device.uuid or None,
        "healthy": device.healthy,
        "problem": device.problem or None,
        "slow": device.slow,
        "sample": next(
            (reading for reading in readings if reading.get("index") == device.index), None
        ),
    }
