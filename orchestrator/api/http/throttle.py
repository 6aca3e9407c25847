"""Rate limit: requests per minute of a token, a session's user or an address.

Counts in Redis, shared by all web processes; in this process while Redis is unreachable.
"""

from __future__ import annotations

import threading
import time

import redis
from django.conf import settings

from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.common.redis import quick_client

WINDOW_S = 60
# after a failed call to Redis, so that not every request waits for a connection
_REDIS_PAUSE_S = 5.0

_lock = threading.Lock()
_local: dict[str, int] = {}
_local_window = 0
_redis_paused_until = 0.0


def check(ident: str, *, limit: int | None = None) -> None:
    """Count one request; raise Refusal 429 with `retry_after_s` above the limit.

    `limit` defaults to ORRERY_RATE_PER_MINUTE; 0: no limit.
    """
    limit = int(settings.ENV.rate_per_minute) if limit is None else limit
    if limit <= 0:
        return
    now = clock.now().timestamp()
    window = int(now // WINDOW_S)
    if _count(ident, window) <= limit:
        return
    wait_s = max(1, round((window + 1) * WINDOW_S - now))
    raise Refusal(
        "too-many-requests",
        "Too many requests",
        429,
        f"More than {limit} requests within a minute. Wait {wait_s} s; send points in batches of "
        "up to 10,000, and follow a run by its websocket instead of polling.",
        retry_after_s=wait_s,
    )


def _count(ident: str, window: int) -> int:
    global _redis_paused_until
    if time.monotonic() >= _redis_paused_until:
        try:
            key = f"orrery:rate:{ident}:{window}"
            pipeline = quick_client().pipeline(transaction=False)
            pipeline.incr(key)
            pipeline.expire(key, 2 * WINDOW_S)
            return int(pipeline.execute()[0])
        except (redis.RedisError, OSError):
            _redis_paused_until = time.monotonic() + _REDIS_PAUSE_S
    return _count_locally(ident, window)


def _count_locally(ident: str, window: int) -> int:
    global _local_window
    with _lock:
        if window != _local_window:
            _local.clear()
            _local_window = window
        _local[ident] = _local.get(ident, 0) + 1
        return _local[ident]
