"""Health of Redis and lag of the readers of its streams, of all nodes together.

Does not depend on the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis as redis_py

from orchestrator.common import redis, stream_groups
from workers.contracts.wire import names


def broker_health(nodes: Sequence[str]) -> dict[str, Any]:
    """`{redis: {ok}, reports: {…}, ingest: {waiting, lag_s}}`.

    `lag_s` is the age of the oldest entry that is not acknowledged; `idle_s` is the time since a
    reader last read, None before the first.
    """
    reports = [names.JOINS, names.REPORTS, *map(names.reports_stream, nodes)]
    telemetry = [names.TELEMETRY, *map(names.telemetry_stream, nodes)]
    try:
        client = redis.quick_client()
        client.ping()
        return {
            "redis": {"ok": True},
            "reports": stream_groups.waiting(client, names.REPORTS_GROUP, reports),
            "ingest": stream_groups.waiting(client, names.TELEMETRY_GROUP, telemetry),
        }
    except (redis_py.RedisError, OSError):
        unknown = {"waiting": None, "lag_s": 0.0, "idle_s": None}
        return {"redis": {"ok": False}, "reports": unknown, "ingest": unknown}
