"""Messages of the agent to the control plane: heartbeats and reports of unknown attempts.

Nothing is queued while Redis is unreachable: a late heartbeat is worthless.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import redis

from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import (
    AttemptReport,
    AttemptSeen,
    DeviceSample,
    Heartbeat,
    NodeInventory,
)

log = logging.getLogger(__name__)
HEARTBEAT_TTL_S = 60.0
MAX_UNREAD = 20_000  # entries in the stream; more heartbeats would only fill Redis


class Reporter:
    """Sends sealed messages of one node to Redis."""

    def __init__(self, *, node: str, secret: bytes, redis_url: str) -> None:
        self._node, self._secret = node, secret
        self._redis = redis.Redis.from_url(
            redis_url, socket_timeout=5, socket_connect_timeout=5, retry=None
        )
        self._disconnected = False

    def heartbeat(
        self,
        samples: list[DeviceSample],
        attempts: list[AttemptSeen],
        inventory: NodeInventory | None = None,
    ) -> bool:
        """Send a heartbeat; whether Redis has it."""
        beat = Heartbeat(
            node=self._node,
            time=time.time(),
            samples=samples,
            attempts=attempts,
            inventory=inventory,
        )
        return self._send(names.KIND_HEARTBEAT, beat.to_dict(), HEARTBEAT_TTL_S)

    def unknown(self, attempt_id: str, fence: str) -> bool:
        """Report that this node does not have the attempt of a control order."""
        data = {"class": "lost", "reason": f"Node {self._node} does not have this attempt."}
        report = AttemptReport(
            attempt_id=attempt_id,
            fence=fence,
            node=self._node,
            seq=0,
            time=time.time(),
            type="exited",
            data=data,
        )
        return self._send(names.KIND_REPORT, report.to_dict(), names.REPORT_TTL_S)

    def orders_waiting(self) -> int:
        """Unconsumed messages in this node's queue; 0 while Redis is unreachable."""
        try:
            return int(self._redis.llen(names.node_queue(self._node)))
        except (redis.RedisError, OSError):
            return 0

    def _send(self, kind: str, body: dict[str, Any], ttl_s: float) -> bool:
        text = envelope.seal(
            self._secret, kind, body, ttl_s=ttl_s, now=time.time(), node=self._node
        )
        try:
            if kind == names.KIND_HEARTBEAT and int(self._redis.xlen(names.REPORTS)) > MAX_UNREAD:
                return False
            self._redis.xadd(names.REPORTS, {names.FIELD_MESSAGE: text})
        except (redis.RedisError, OSError) as error:
            if not self._disconnected:
                log.warning("Redis is unreachable, no heartbeats are sent: %s", error)
            self._disconnected = True
            return False
        if self._disconnected:
            log.info("Redis is reachable again")
        self._disconnected = False
        return True
