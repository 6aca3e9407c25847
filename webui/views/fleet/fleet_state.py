"""What Overview and the fleet page show of all nodes; equal for all users, and read once for many.

Of a large fleet it is some seconds old; the rows of nodes on the fleet page are always new.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from orchestrator.fleet import selectors as fleet
from orchestrator.scheduling import selectors as scheduling
from webui.shared_parts import SharedPart


class FleetState(NamedTuple):
    """All nodes by name, current allocations by node, allocated devices, and pools."""

    nodes: list[fleet.NodeFacts]
    by_node: dict[int, list[scheduling.HeldShare]]
    held: int
    pools: list[Any]


def _read() -> FleetState:
    by_node = scheduling.held_by_node()
    held = sum(share.devices for shares in by_node.values() for share in shares)
    return FleetState(fleet.all_node_facts(), by_node, held, list(fleet.pools()))


fleet_state = SharedPart(_read)
