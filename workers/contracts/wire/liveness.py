"""Heartbeats of nodes and leases of attempts: keys of each node, which other nodes cannot write.

Does not depend on Redis itself.
"""

from __future__ import annotations

from typing import Final

from workers.contracts.wire.names import node_key

# hash: fence -> Unix seconds; attempts that the control plane has ended, whose ranks must stop
REVOKED: Final = "orrery:revoked"
REVOKED_TTL_S: Final = 7 * 24 * 3600.0
RENEW_S: Final = 5.0

# field of a heartbeat's entry: the sealed text
FIELD_BEAT: Final = "m"
OLD_BEATS: Final = 1000  # the reports stream takes no heartbeats beyond this length


def heartbeat_key(node: str) -> str:
    """Redis stream with the node's newest heartbeat; its id is the time by the broker's clock."""
    return node_key(node, "heartbeat")


def leases_key(node: str) -> str:
    """Redis hash: fence -> a text that changes with each renewal.

    A supervisor renews it while it runs the attempt; the control plane notes when it changes.
    """
    return node_key(node, "leases")


def stamp_of(entry: bytes | str) -> float:
    """Unix seconds by the broker's clock, from the id of a stream's entry."""
    text = entry.decode() if isinstance(entry, bytes) else entry
    return int(text.partition("-")[0]) / 1000


def lease_seconds(node_lost_s: float) -> float:
    """How long after its last renewal an attempt may run: it ends before the node counts as lost.

    The margin covers the fleet's poll interval and the time in which killed ranks disappear.
    """
    return node_lost_s * 0.85
