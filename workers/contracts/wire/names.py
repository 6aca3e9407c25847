"""Names that both sides of the wire use: Redis keys and streams, Celery queues and tasks, envelope
kinds, time limits.

Names only; `docs/house.md` tells who writes and who reads.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote, urlsplit

REPORTS: Final = "orrery:reports"
REPORTS_GROUP: Final = "control"
TELEMETRY: Final = "orrery:telemetry"
TELEMETRY_GROUP: Final = "ingest"
TICK: Final = "orrery:tick"
# stream fields
FIELD_MESSAGE: Final = "m"
FIELD_NODE: Final = "node"

TASK_LAUNCH: Final = "agent.launch"
TASK_CONTROL: Final = "agent.control"
TASK_PROBE: Final = "agent.probe"
TASK_KEEP: Final = "agent.keep"

KIND_JOIN: Final = "join"
KIND_HEARTBEAT: Final = "heartbeat"
KIND_REPORT: Final = "report"
KIND_TELEMETRY: Final = "telemetry"
KIND_LAUNCH: Final = "launch"
KIND_CONTROL: Final = "control"
KIND_PROBE: Final = "probe"
KIND_KEEP: Final = "keep"
KIND_RENDEZVOUS: Final = "rendezvous"

STREAM_POINTS: Final = "points"
STREAM_EVENTS: Final = "events"
STREAM_LOGS: Final = "logs"
# rank of a supervisor's own lines
SUPERVISOR_RANK: Final = -1

JOIN_REPLY_TTL_S: Final = 60
ORDER_TTL_S: Final = 120
REPORT_TTL_S: Final = 7 * 24 * 3600
ACKED_TTL_S: Final = 24 * 3600
RENDEZVOUS_TTL_S: Final = 600
HEARTBEAT_S: Final = 2.0


def node_queue(node: str) -> str:
    """The Celery queue that only this node's agent reads."""
    return f"node.{node}"


def join_reply_key(request: str) -> str:
    """List on which the reply to one join request is pushed."""
    return f"orrery:join:{request}"


def acked_key(attempt_id: str | int) -> str:
    """Hash `points/0` → the last sequence number committed of that stream and rank."""
    return f"orrery:acked:{attempt_id}"


def acked_field(stream: str, rank: int) -> str:
    return f"{stream}/{rank}"


def rendezvous_key(fence: str) -> str:
    return f"orrery:rdzv:{fence}"


def live_channel(topic: str) -> str:
    """Pub/sub channel of a live topic (`run:12`, `fleet`)."""
    return f"orrery:live:{topic}"


def broker_url(redis_url: str) -> str:
    """Celery's spelling of a Redis URL: unix sockets are `redis+socket://` there."""
    if not redis_url.startswith("unix:"):
        return redis_url
    parts = urlsplit(redis_url)
    password = f"?password={quote(unquote(parts.password), safe='')}" if parts.password else ""
    return f"redis+socket://{parts.path}{password}"
