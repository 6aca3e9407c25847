"""Describes the node and pipeline stage of each rank. Pure functions.

Ranks are in placement order, stages outermost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import gettext as _


def describe_places(
    placement: Sequence[Mapping[str, Any]], plan: Mapping[str, Any] | None
) -> list[str]:
    """Return one text per rank, like `node n1, stage 0`; omits a single stage and unknown nodes."""
    nodes = [
        str(share.get("host") or share["node"]) for share in placement for _ in share["devices"]
    ]
    plan = plan or {}
    stages = int(plan.get("pp") or 1)
    world = stages
    for axis in ("dp", "tp", "cp"):
        world *= int(plan.get(axis) or 1)
    places = []
    for rank in range(max(len(nodes), world if stages > 1 else 0)):
        node = _("node %(node)s") % {"node": nodes[rank]} if rank < len(nodes) else ""
        stage = (
            _("stage %(stage)s") % {"stage": rank * stages // world}
            if stages > 1 and rank < world
            else ""
        )
        places.append(", ".join(part for part in (node, stage) if part))
    return places
