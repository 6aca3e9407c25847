"""A supervisor's connection to Redis: sends sealed reports and telemetry, reads acknowledgements.

Never raises for a lost connection: it returns False or None, backs off, and counts connections, so
that the outbox can rewind after a new one.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis

from workers.contracts.wire import envelope, names
from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.broker.tls import tls_options
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.isolation.acting import as_agent
from workers.launcher.rundir import read_json

Answer = TypeVar("Answer")
_LONGEST_WAIT_S = 5.0
_CONTROL_EVERY_S = 10.0


@dataclass(frozen=True)
class NodeFile:
    """A node's identity, stored with mode 600 under its home; the secret is never sent."""

    node: str
    secret: bytes
    redis_url: str
    address: str

    @classmethod
    def read(cls, path: Path) -> NodeFile:
        """Raises OSError for a file that cannot be read."""
        with as_agent():  # a supervisor may act as its run's user
            data = read_json(path)
        if not data:
            raise OSError(f"{path} cannot be read; join the node again with a new token")
        return cls(data["node"], bytes.fromhex(data["secret"]), data["redis"], data["address"])


class Link:
    """`generation` increases with every new connection; 0 before the first."""

    def __init__(self, node_file: Path, order: LaunchOrder) -> None:
        self._path = node_file
        self.node = NodeFile.read(node_file)
        self._stamp = _stamp(node_file)
        self.order = order
        self.generation = 0
        self._client: redis.Redis | None = None
        self._wait_s = 0.0
        self._retry_at = 0.0
        self._reports: deque[dict[str, Any]] = deque()
        self._seq = 0
        # whether the control plane reads the node's own streams; None: not known yet
        self._own_streams: bool | None = None
        self._control_due = 0.0

    def report(self, kind: str, data: dict[str, Any], *, now: float | None = None) -> None:
        """Queue one AttemptReport; `flush` sends reports in order once Redis is reachable."""
        self._seq += 1
        body = {
            "attempt_id": self.order.attempt_id,
            "fence": self.order.fence,
            "node": self.node.node,
            "seq": self._seq,
            "time": now or time.time(),
            "type": kind,
            "data": data,
        }
        self._reports.append(body)

    def flush(self) -> bool:
        """Send queued reports; True if none is left."""
        while self._reports:
            self._reload_node()
            text = self._sealed(names.KIND_REPORT, self._reports[0])
            stream = self._stream(names.reports_stream, names.REPORTS)
            if not self._add(stream, {names.FIELD_MESSAGE: text}):
                return False
            self._reports.popleft()
        return True

    def telemetry(self, batches: list[dict[str, Any]]) -> bool:
        """Send one envelope of batches; True when Redis has it."""
        self._reload_node()
        head = {
            "run": self.order.run,
            "attempt": self.order.attempt,
            "attempt_id": self.order.attempt_id,
        }
        text = self._sealed(
            names.KIND_TELEMETRY, {**head, "fence": self.order.fence, "batches": batches}
        )
        fields = {
            names.FIELD_NODE: self.node.node,
            names.FIELD_RUN: self.order.run,
            names.FIELD_MESSAGE: text,
        }
        return self._add(self._stream(names.telemetry_stream, names.TELEMETRY), fields)

    def _stream(self, own: Callable[[str], str], shared: str) -> str:
        """The node's own stream; the shared one while the control plane may be of release 0.1.

        A node with a user of its own at the broker may only write to its own. When the choice
        changes, the connection ends, so that the outbox rewinds.
        """
        if broker_access.is_node_user(self.node.redis_url):
            return own(self.node.node)
        if time.monotonic() >= self._control_due:
            known = self._call(lambda client: bool(client.exists(names.CONTROL)))
            if known is not None:
                self._control_due = time.monotonic() + _CONTROL_EVERY_S
                if self._own_streams not in (None, known) and self._client is not None:
                    self._client.close()
                    self._client = None
                self._own_streams = known
        return own(self.node.node) if self._own_streams else shared

    def _add(self, stream: str, fields: dict[Any, Any]) -> bool:
        return self._call(lambda client: client.xadd(stream, fields)) is not None

    def acked(self) -> dict[str, int] | None:
        """`points/0` → the last number that ingest committed; None while Redis is unreachable."""
        acked = self._call(lambda client: client.hgetall(names.acked_key(self.order.attempt_id)))
        return None if acked is None else {str(key): int(value) for key, value in acked.items()}

    def publish_rendezvous(self, host: str, port: int, purpose: str = "") -> bool:
        """Publish where this attempt's nodes meet; whether Redis has it."""
        key = self._rendezvous_name(purpose)
        # nodes share no secret, so the seal only guards against accidents: each node takes the host
        # from its own order
        text = envelope.seal(
            self._rendezvous_key(),
            names.KIND_RENDEZVOUS,
            {"host": host, "port": port},
            ttl_s=names.RENDEZVOUS_TTL_S,
            now=time.time(),
            node=self.node.node,
        )
        return bool(self._call(lambda client: client.set(key, text, ex=names.RENDEZVOUS_TTL_S)))

    def rendezvous(self, purpose: str = "") -> tuple[str, int] | None:
        """The rendezvous that the first node's supervisor published, or None."""
        key = self._rendezvous_name(purpose)
        text = self._call(lambda client: client.get(key))
        if not text:
            return None
        try:
            body = envelope.open_envelope(
                # another node's clock set the expiry; the key itself expires at the broker
                self._rendezvous_key(),
                text,
                kind=names.KIND_RENDEZVOUS,
                now=0.0,
            )
        except envelope.EnvelopeError:
            return None
        return str(body["host"]), int(body["port"])

    def _rendezvous_name(self, purpose: str) -> str:
        first = self.order.rendezvous.node
        return names.rendezvous_key(self.order.fence, purpose, node=first)

    def _rendezvous_key(self) -> bytes:
        return f"rendezvous {self.order.fence}".encode()

    def _sealed(self, kind: str, body: dict[str, Any]) -> str:
        node = self.node
        return envelope.seal(
            node.secret, kind, body, ttl_s=names.REPORT_TTL_S, now=time.time(), node=node.node
        )

    def _reload_node(self) -> None:
        """Reconnect if the node joined again and has another secret.

        Messages sealed by the old one were refused; a new connection makes the outbox rewind.
        """
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        with contextlib.suppress(OSError):
            before, self.node = self.node, NodeFile.read(self._path)
            self._stamp = stamp
            if self.node != before and self._client is not None:
                self._client.close()
                self._client = None

    def _call(self, request: Callable[[redis.Redis], Answer]) -> Answer | None:
        if time.monotonic() < self._retry_at:
            return None
        try:
            if self._client is None:
                self._client = self._connect()
            answer = request(self._client)
            self._wait_s = 0.0
            return answer
        except (redis.RedisError, OSError):
            if self._client is not None:
                self._client.close()
                self._client = None
            self._wait_s = min(_LONGEST_WAIT_S, max(0.1, self._wait_s * 2))
            self._retry_at = time.monotonic() + self._wait_s
            return None

    def _connect(self) -> redis.Redis:
        with contextlib.suppress(OSError):
            self.node = NodeFile.read(self._path)  # a restarted agent may have a new address
        return redis.Redis.from_url(
            self.node.redis_url,
            decode_responses=True,
            socket_timeout=5,
            socket_connect_timeout=5,
            retry=None,
            redis_connect_func=self._connected,
            client_name="orrery-supervisor",
            **tls_options(self.node.redis_url),
        )

    def _connected(self, connection: Any) -> None:
        connection.on_connect()
        self.generation += 1


def _stamp(path: Path) -> tuple[int, int]:
    try:
        with as_agent():
            status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_ino)
