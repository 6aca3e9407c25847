"""Names that control plane and nodes share: Redis keys, Celery queues, envelope kinds, time limits.

`docs/architecture.md` describes who writes and who reads each.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

# streams that all nodes share: of nodes of release 0.1, and while the control plane may be of it
REPORTS: Final = "orrery:reports"
REPORTS_GROUP: Final = "control"
TELEMETRY: Final = "orrery:telemetry"
JOINS: Final = "orrery:joins"  # stream of join requests, read like reports
TELEMETRY_GROUP: Final = "ingest"
TICK: Final = "orrery:tick"
# stream fields
FIELD_MESSAGE: Final = "m"
FIELD_NODE: Final = "node"
FIELD_RUN: Final = "run"  # of telemetry entries: whose share of ingest they take

TASK_LAUNCH: Final = "agent.launch"
TASK_CONTROL: Final = "agent.control"
TASK_PROBE: Final = "agent.probe"
TASK_KEEP: Final = "agent.keep"
TASK_COLLECT: Final = "agent.collect"

KIND_JOIN: Final = "join"
KIND_HEARTBEAT: Final = "heartbeat"
KIND_REPORT: Final = "report"
KIND_TELEMETRY: Final = "telemetry"
KIND_LAUNCH: Final = "launch"
KIND_CONTROL: Final = "control"
KIND_PROBE: Final = "probe"
KIND_KEEP: Final = "keep"
KIND_COLLECT: Final = "collect"
KIND_COLLECTED: Final = "collected"
KIND_PROBED: Final = "probed"
KIND_RENDEZVOUS: Final = "rendezvous"

STREAM_POINTS: Final = "points"
STREAM_EVENTS: Final = "events"
STREAM_LOGS: Final = "logs"
# rank of log lines of the supervisor itself
SUPERVISOR_RANK: Final = -1

# `code` of a join reply that refuses a node for its versions
INCOMPATIBLE: Final = "incompatible"
# for `node_key`: orders that the agent has taken and not finished, as its Celery worker stores them
UNACKED: Final = "unacked"
UNACKED_INDEX: Final = "unacked_index"
# for `node_key` of a supervisor in another engine's job: its sealed launch order, the newest sealed
# control order, and the job that claimed the attempt's part
ENGINE_ORDER: Final = "order"
ENGINE_REQUEST: Final = "request"
ENGINE_CLAIM: Final = "claim"
ENGINE_ORDER_TTL_S: Final = 30 * 24 * 3600
# environment variable of an engine's job: base64 of `cluster_engines.jobs.JobTicket`
ENGINE_TICKET: Final = "ORRERY_ENGINE_TICKET"
# environment variables of a job in Kubernetes: its pod, that pod's address, and the name of the
# first node's pod
JOB_ID: Final = "ORRERY_JOB_ID"
JOB_ADDRESS: Final = "ORRERY_JOB_ADDRESS"
JOB_HOST: Final = "ORRERY_JOB_HOST"
JOIN_REPLY_TTL_S: Final = 60
ORDER_TTL_S: Final = 120
REPORT_TTL_S: Final = 7 * 24 * 3600
ACKED_TTL_S: Final = 24 * 3600
RENDEZVOUS_TTL_S: Final = 600
HEARTBEAT_S: Final = 5.0
# the control plane's versions, which its scheduler renews; absent while none of 0.2 or later runs
CONTROL: Final = "orrery:control"
CONTROL_TTL_S: Final = 15


def node_queue(node: str) -> str:
    """The Celery queue of one node's agent."""
    return f"node.{node}"


def node_key(node: str, name: str) -> str:
    """A Redis key that only this node and the control plane write; `:` is in no node's name."""
    return f"orrery:node:{node}:{name}"


def reports_stream(node: str) -> str:
    """Stream of the node's reports."""
    return node_key(node, "reports")


def node_of_stream(stream: str) -> str | None:
    """The node that alone writes to a stream; None of a stream that nodes share."""
    parts = stream.split(":")
    return parts[2] if parts[:2] == ["orrery", "node"] and len(parts) == 4 else None


def telemetry_stream(node: str) -> str:
    """Stream of the node's points, events and log lines."""
    return node_key(node, "telemetry")


def join_reply_key(request: str) -> str:
    """Redis list for the reply to one join request."""
    return f"orrery:join:{request}"


def acked_key(attempt_id: str | int) -> str:
    """Redis hash `points/0` → last committed sequence number of that stream and rank."""
    return f"orrery:acked:{attempt_id}"


def acked_field(stream: str, rank: int) -> str:
    """Field of `acked_key` for a stream and rank."""
    return f"{stream}/{rank}"


def rendezvous_key(fence: str, purpose: str = "", *, node: str | None = None) -> str:
    """Redis key of the host and port where the ranks of an attempt, or its probes, meet.

    `node` is the first node, which writes it. None: it is of release 0.1, or unknown.
    """
    end = f"{fence}:{purpose}" if purpose else fence
    return f"orrery:rdzv:{end}" if node is None else node_key(node, f"rdzv:{end}")


def live_channel(topic: str) -> str:
    """Pub/sub channel of a live topic (`run:12`, `fleet`)."""
    return f"orrery:live:{topic}"


def broker_url(redis_url: str) -> str:
    """A Redis URL as Celery expects it: unix sockets are `redis+socket://`."""
    if not redis_url.startswith("unix:"):
        return redis_url
    parts = urlsplit(redis_url)
    return f"redis+socket://{parts.netloc}{parts.path}"
