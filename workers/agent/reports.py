"""Messages of the agent to the control plane: heartbeats and reports of unknown attempts.

Nothing is queued while Redis is unreachable: a late heartbeat is worthless. While no scheduler of
release 0.2 or later runs, heartbeats are also sent as release 0.1 reads them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from workers.contracts.wire import envelope, liveness, names, versions
from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.broker.tls import tls_options
from workers.contracts.wire.field_versions import message_for
from workers.contracts.wire.maintenance.node_probe import NodeProbed
from workers.contracts.wire.maintenance.storage import StorageReport
from workers.contracts.wire.node_messages import (
    AttemptReport,
    AttemptSeen,
    DeviceSample,
    Heartbeat,
    NodeInventory,
    NodeSample,
)

log = logging.getLogger(__name__)
HEARTBEAT_TTL_S = 60.0


class Reporter:
    """Sends sealed messages of one node to Redis."""

    def __init__(self, *, node: str, secret: bytes, redis_url: str) -> None:
        self._node, self._secret = node, secret
        self._redis = redis.Redis.from_url(
            redis_url,
            socket_timeout=5,
            socket_connect_timeout=5,
            retry=None,
            **tls_options(redis_url),
        )
        self._disconnected = False
        self._own_user = broker_access.is_node_user(redis_url)
        # the control plane's versions; None while none is published
        self.control: versions.PeerVersion | None = None

    def heartbeat(
        self,
        samples: list[DeviceSample],
        attempts: list[AttemptSeen],
        inventory: NodeInventory | None = None,
        dropped_orders: int = 0,
        machine: NodeSample | None = None,
    ) -> bool:
        """Replace this node's heartbeat in the broker, which stamps it; whether Redis has it."""
        beat = Heartbeat(
            node=self._node,
            time=time.time(),
            samples=samples,
            attempts=attempts,
            inventory=inventory,
            release=versions.RELEASE,
            wire=str(versions.WIRE),
            dropped_orders=dropped_orders or None,
            machine=machine,
        )
        text = self._sealed(names.KIND_HEARTBEAT, beat.to_dict(), HEARTBEAT_TTL_S)
        old = ""
        if self.control is None and not self._own_user:
            body = message_for(beat, versions.FIRST)
            old = self._sealed(names.KIND_HEARTBEAT, body, HEARTBEAT_TTL_S)
        return self._try(lambda: self._beat(text, old))

    def _beat(self, text: str, old: str) -> None:
        """Replace the heartbeat and read the control plane's versions.

        Only while no scheduler publishes them, the heartbeat is also an entry of the reports
        stream, as release 0.1 reads it.
        """
        with self._redis.pipeline(transaction=False) as pipe:
            key = liveness.heartbeat_key(self._node)
            pipe.xadd(key, {liveness.FIELD_BEAT: text}, maxlen=1, approximate=False)
            pipe.get(names.CONTROL)
            if old:
                pipe.xlen(names.REPORTS)
            _, control, *waiting = pipe.execute()
        if not control and old and waiting[0] < liveness.OLD_BEATS:
            self._redis.xadd(names.REPORTS, {names.FIELD_MESSAGE: old})
        self._hear(control)

    def _hear(self, answer: Any) -> None:
        """Take the control plane's versions, and log a difference once."""
        before, self.control = self.control, parse_control(answer)
        if self.control is None or self.control == before:
            return
        judgment = versions.judge(self.control, name="the control plane", own_name="agent")
        if judgment.skew is versions.Skew.REFUSED:
            log.error("%s This node gets no new work; its running attempts continue.", judgment)
        elif judgment.skew is versions.Skew.MINOR:
            log.warning("%s", judgment)

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
        text = self._sealed(names.KIND_REPORT, report.to_dict(), names.REPORT_TTL_S)
        return self._try(lambda: self._redis.xadd(self._reports, {names.FIELD_MESSAGE: text}))

    def collected(self, report: StorageReport) -> bool:
        """Report deleted paths and scanned folders; whether Redis has it."""
        text = self._sealed(names.KIND_COLLECTED, report.to_dict(), names.REPORT_TTL_S)
        return self._try(lambda: self._redis.xadd(self._reports, {names.FIELD_MESSAGE: text}))

    def probed(self, answer: NodeProbed) -> bool:
        """Report the result of a requested probe; whether Redis has it."""
        text = self._sealed(names.KIND_PROBED, answer.to_dict(), names.REPORT_TTL_S)
        return self._try(lambda: self._redis.xadd(self._reports, {names.FIELD_MESSAGE: text}))

    @property
    def _reports(self) -> str:
        """This node's stream; the shared one while the control plane may be of release 0.1."""
        own = self._own_user or self.control is not None
        return names.reports_stream(self._node) if own else names.REPORTS

    def orders_waiting(self) -> int:
        """Unconsumed messages in this node's queue; 0 while Redis is unreachable."""
        try:
            return int(self._redis.llen(names.node_queue(self._node)))
        except (redis.RedisError, OSError):
            return 0

    def _sealed(self, kind: str, body: dict[str, Any], ttl_s: float) -> str:
        return envelope.seal(
            self._secret, kind, body, ttl_s=ttl_s, now=time.time(), node=self._node
        )

    def _try(self, send: Callable[[], Any]) -> bool:
        try:
            send()
        except (redis.RedisError, OSError) as error:
            if not self._disconnected and isinstance(error, redis.AuthenticationError):
                log.warning(
                    "Redis refuses this node's user, no heartbeats are sent: %s. A restarted "
                    "broker has it again within seconds; if not, the node was removed, or users "
                    "are turned off: restart this agent, with a join token or a URL with shared "
                    "credentials",
                    error,
                )
            elif not self._disconnected:
                log.warning("Redis is unreachable, no heartbeats are sent: %s", error)
            self._disconnected = True
            return False
        if self._disconnected:
            log.info("Redis is reachable again")
        self._disconnected = False
        return True


def parse_control(text: Any) -> versions.PeerVersion | None:
    """The control plane's versions, as its scheduler publishes them; None if it does not."""
    try:
        data = json.loads(text or "null")
    except (ValueError, TypeError):
        return None
    if not isinstance(data, dict):
        return None
    return versions.parse_peer(data.get("release"), data.get("wire"))
