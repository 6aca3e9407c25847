"""The agent's own words to the control plane: heartbeats, answers to probes, attempts that it does
not know.

Says nothing while Redis is away: a heartbeat is worth nothing later. Does not know how attempts
run.
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
HEARTBEAT_TTL_S = 60.0  # an older one says nothing about now
FULLEST = 20_000  # entries nobody read: more heartbeats would only fill Redis


class Reports:
    def __init__(self, *, node: str, secret: bytes, redis_url: str) -> None:
        self._node, self._secret = node, secret
        self._redis = redis.Redis.from_url(
            redis_url, socket_timeout=5, socket_connect_timeout=5, retry=None
        )
        self._away = False

    def heartbeat(
        self,
        samples: list[DeviceSample],
        attempts: list[AttemptSeen],
        inventory: NodeInventory | None = None,
    ) -> bool:
        beat = Heartbeat(
            node=self._node,
            time=time.time(),
            samples=samples,
            attempts=attempts,
            inventory=inventory,
        )
        return self._send(names.KIND_HEARTBEAT, beat.to_dict(), HEARTBEAT_TTL_S)

    def unknown(self, attempt_id: str, fence: str) -> bool:
        """This node was asked to end an attempt that it does not have."""
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
        """Messages in this node's queue that nobody has taken; 0 while Redis is away."""
        try:
            return int(self._redis.llen(names.queue_of(self._node)))
        except (redis.RedisError, OSError):
            return 0

    def _send(self, kind: str, body: dict[str, Any], ttl_s: float) -> bool:
        text = envelope.seal(
            self._secret, kind, body, ttl_s=ttl_s, now=time.time(), node=self._node
        )
        try:
            if kind == names.KIND_HEARTBEAT and int(self._redis.xlen(names.REPORTS)) > FULLEST:
                return False
            self._redis.xadd(names.REPORTS, {names.FIELD_MESSAGE: text})
        except (redis.RedisError, OSError) as error:
            if not self._away:
                log.warning("Redis is away, heartbeats wait: %s", error)
            self._away = True
            return False
        if self._away:
            log.info("Redis is back")
        self._away = False
        return True
