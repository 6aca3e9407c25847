"""Names that control plane and nodes share: Redis keys, Celery queues, envelope kinds, time limits.

`docs/architecture.md` describes who writes and who reads each.
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
# rank of log lines of the supervisor itself
SUPERVISOR_RANK: Final = -1

JOIN_REPLY_TTL_S: Final = 60
ORDER_TTL_S: Final = 120
REPORT_TTL_S: Final = 7 * 24 * 3600
ACKED_TTL_S: Final = 24 * 3600
RENDEZVOUS_TTL_S: Final = 600
HEARTBEAT_S: Final = 2.0


def node_queue(node: str) -> str:
    """The Celery queue of one node's agent."""
    return f"node.{node}"


def join_reply_key(request: str) -> str:
    """Redis list for the reply to one join request."""
    return f"orrery:join:{request}"


def acked_key(attempt_id: str | int) -> str:
    """Redis hash `points/0` → last committed sequence number of that stream and rank."""
    return f"orrery:acked:{attempt_id}"


def acked_field(stream: str, rank: int) -> str:
    """Field of `acked_key` for a stream and rank."""
    return f"{stream}/{rank}"


def rendezvous_key(fence: str) -> str:
    """Redis key of the host and port where the ranks of an attempt meet."""
    return f"orrery:rdzv:{fence}"


def live_channel(topic: str) -> str:
    """Pub/sub channel of a live topic (`run:12`, `fleet`)."""
    return f"orrery:live:{topic}"


def broker_url(redis_url: str) -> str:
    """A Redis URL as Celery expects it: unix sockets are `redis+socket://`."""
    if not redis_url.startswith("unix:"):
        return redis_url
    parts = urlsplit(redis_url)
    password = f"?password={quote(unquote(parts.password), safe='')}" if parts.password else ""
    return f"redis+socket://{parts.path}{password}"
