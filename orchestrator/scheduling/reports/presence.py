"""What nodes said lately about the attempts they have, and when orders were last sent. In memory
only.

Heartbeats refill it within seconds after a restart, so nothing here is worth a row. Knows no
database.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Presence:
    """Times are of the monotonic clock."""

    since: float = field(default_factory=time.monotonic)  # when this process began to listen
    # fence → node → launching | running
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # (fence, node) → since when a beating node lacks it
    # (fence, what) → when an order was last sent
    sent: dict[tuple[str, str], float] = field(default_factory=dict)
    # (fence, what) → when it was first wanted
    first: dict[tuple[str, str], float] = field(default_factory=dict)

    def saw(self, fence: str, node: str, state: str) -> None:
        nodes = self.states.setdefault(fence, {})
        if nodes.get(node) != "running":
            nodes[node] = state
        self.missing.pop((fence, node), None)

    def lacks(self, fence: str, node: str) -> None:
        """A heartbeat of this node did not name the attempt."""
        self.missing.setdefault((fence, node), time.monotonic())

    def missing_for(self, fence: str, node: str) -> float:
        """Seconds for which a beating node has not had the attempt."""
        since = self.missing.get((fence, node))
        return 0.0 if since is None else time.monotonic() - since

    def all_running(self, fence: str, nodes: list[str]) -> bool:
        seen = self.states.get(fence, {})
        return all(seen.get(node) == "running" for node in nodes)

    def due(self, fence: str, what: str, every_s: float) -> bool:
        """True, and remembered, at most once in `every_s` seconds."""
        now, key = time.monotonic(), (fence, what)
        if now - self.sent.get(key, float("-inf")) < every_s:
            return False
        self.sent[key] = now
        return True

    def wanted_for(self, fence: str, what: str) -> float:
        """Seconds since this was first asked about."""
        return time.monotonic() - self.first.setdefault((fence, what), time.monotonic())

    def forget(self, fence: str) -> None:
        self.states.pop(fence, None)
        for table in (self.missing, self.sent, self.first):
            for key in [key for key in table if key[0] == fence]:
                del table[key]


presence = Presence()
