"""Where ranks are: node and pipeline stage of each.

Pure; ranks come as they are placed, stages outermost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def places(placement: Sequence[Mapping[str, Any]], plan: Mapping[str, Any] | None) -> list[str]:
    """One text a rank, `node n1, stage 0`; no stage where there is but one, no node where none is
    known.
    """
    nodes = [str(share["node"]) for share in placement for _ in share["devices"]]
    plan = plan or {}
    stages = int(plan.get("pp") or 1)
    world = stages
    for axis in ("dp", "tp", "cp"):
        world *= int(plan.get(axis) or 1)
    found = []
    for rank in range(max(len(nodes), world if stages > 1 else 0)):
        node = f"node {nodes[rank]}" if rank < len(nodes) else ""
        stage = f"stage {rank * stages // world}" if stages > 1 and rank < world else ""
        found.append(", ".join(part for part in (node, stage) if part))
    return found
