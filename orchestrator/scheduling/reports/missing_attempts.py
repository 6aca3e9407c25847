"""Attempts that heartbeats lack, and when orders were last sent; in memory only.

Heartbeats restore it within seconds after a restart. Does not depend on the database.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Presence:
    """Recent reports by fence; times are those of the monotonic clock."""

    missing: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # (fence, node) → since when the node's heartbeats lack it
    # (fence, order) → when it was last sent
    sent: dict[tuple[str, str], float] = field(default_factory=dict)
    # (fence, order) → when it was first requested
    first: dict[tuple[str, str], float] = field(default_factory=dict)

    def present(self, fence: str, node: str) -> None:
        """Record that the node reports the attempt."""
        self.missing.pop((fence, node), None)

    def lacks(self, fence: str, node: str) -> None:
        """Record that a heartbeat of the node lacks the attempt."""
        self.missing.setdefault((fence, node), time.monotonic())

    def missing_for(self, fence: str, node: str) -> float:
        """Seconds for which the node's heartbeats have lacked the attempt."""
        since = self.missing.get((fence, node))
        return 0.0 if since is None else time.monotonic() - since

    def due(self, fence: str, order: str, every_s: float) -> bool:
        """True at most once per `every_s` seconds, for repeated orders."""
        now, key = time.monotonic(), (fence, order)
        if now - self.sent.get(key, float("-inf")) < every_s:
            return False
        self.sent[key] = now
        return True

    def wanted_for(self, fence: str, order: str) -> float:
        """Seconds since the first call for this order."""
        return time.monotonic() - self.first.setdefault((fence, order), time.monotonic())

    def forget(self, fence: str) -> None:
        """Remove everything about the attempt."""
        for table in (self.missing, self.sent, self.first):
            for key in [key for key in list(table) if key[0] == fence]:  # engines have threads
                table.pop(key, None)


presence = Presence()
