"""Health of Redis and lag of the readers of its two streams.

Does not depend on the database.
"""

from __future__ import annotations

import time
from typing import Any

import redis as redis_py

from orchestrator.common import redis
from workers.contracts.wire import names


def broker_health() -> dict[str, Any]:
    """`{redis: {ok}, reports: {…}, ingest: {waiting, lag_s}}`.

    `lag_s` is the age of the oldest entry that is not acknowledged.
    """
    try:
        client = redis.quick_client()
        client.ping()
        return {
            "redis": {"ok": True},
            "reports": _stream(client, names.REPORTS, names.REPORTS_GROUP),
            "ingest": _stream(client, names.TELEMETRY, names.TELEMETRY_GROUP),
        }
    except (redis_py.RedisError, OSError):
        unknown = {"waiting": None, "lag_s": 0.0}
        return {"redis": {"ok": False}, "reports": unknown, "ingest": unknown}


def _stream(client: redis_py.Redis, stream: str, group: str) -> dict[str, Any]:
    """Number of entries that the group has not acknowledged, and the age of the oldest."""
    try:
        groups: Any = client.xinfo_groups(stream)
    except redis_py.ResponseError:  # the stream does not exist yet
        return {"waiting": 0, "lag_s": 0.0}
    mine = next((row for row in groups if row["name"] in (group, group.encode())), None)
    if mine is None:
        return {"waiting": int(client.xlen(stream)), "lag_s": 0.0}
    pending: Any = client.xpending(stream, group)
    unread: Any = client.xrange(stream, min=b"(" + mine["last-delivered-id"], count=1)
    oldest = [id for id in (pending["min"], unread[0][0] if unread else None) if id]
    ages = [time.time() - int(id.split(b"-")[0]) / 1000 for id in oldest]
    waiting = int(mine["pending"]) + int(mine.get("lag") or 0)
    return {"waiting": waiting, "lag_s": round(max([0.0, *ages]), 1)}
