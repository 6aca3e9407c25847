"""Reads cordons: nodes and devices that get no work. Does not depend on who creates them."""

from __future__ import annotations

from typing import Any

from django.db.models import Exists, OuterRef, Prefetch, QuerySet

from orchestrator.common.units import iso
from orchestrator.fleet.models import Cordon, Device, Node


def open_cordons(**of: Any) -> QuerySet[Cordon]:
    """Cordons that are not lifted, oldest first."""
    return Cordon.objects.filter(lifted=None, **of).order_by("id")


def cordons_of(*, node: Node) -> QuerySet[Cordon]:
    """The cordons of a node and its devices, lifted ones too, newest first."""
    return node.cordons.select_related("device").order_by("-id")


def open_of(node: Node) -> list[Cordon]:
    """The node's open cordons and those of its devices; prefetched by `with_open_cordons`."""
    prefetched: list[Cordon] | None = getattr(node, "open_cordons", None)
    if prefetched is not None:
        return prefetched
    return list(node.cordons.filter(lifted=None).select_related("device"))


def with_open_cordons(nodes: QuerySet[Node]) -> QuerySet[Node]:
    """Prefetch what `open_of` reads."""
    rows = open_cordons().select_related("device")
    return nodes.prefetch_related(Prefetch("cordons", queryset=rows, to_attr="open_cordons"))


def usable_devices() -> QuerySet[Device]:
    """Healthy devices without a cordon of their own; their node may be unusable."""
    return Device.objects.filter(~has_open_cordon("device"), healthy=True)


def has_open_cordon(reference: str) -> Exists:
    """For querysets of nodes or devices: whether the row in `reference` is cordoned itself."""
    column, rows = ("device", {}) if reference == "device" else ("node", {"device": None})
    return Exists(Cordon.objects.filter(**{column: OuterRef("pk")}, lifted=None, **rows))


def counts() -> dict[str, int]:
    """Cordoned nodes, and devices with a cordon of their own."""
    rows = list(Cordon.objects.filter(lifted=None).values_list("device", flat=True))
    nodes = sum(device is None for device in rows)
    return {"node": nodes, "device": len(rows) - nodes}


def serialize_cordon(cordon: Cordon) -> dict[str, Any]:
    """The REST representation of a cordon; `device` is an index, null: the whole node."""
    return {
        "device": cordon.device.index if cordon.device else None,
        "cause": cordon.cause,
        "reason": cordon.reason,
        "data": cordon.data,
        "created": iso(cordon.created),
        "created_by": cordon.created_by or None,
        "lifted": iso(cordon.lifted),
        "lifted_by": cordon.lifted_by or None,
    }
