"""How many requests a token, a session's user or an address may make each minute.

Counts in Redis, so that all web processes count together, and in this process while Redis is away.
Knows no route.
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
# after a failed call to Redis: a refused connection at every request would double its cost
_AWAY_S = 5.0

_lock = threading.Lock()
_local: dict[str, int] = {}
_local_window = 0
_redis_away_until = 0.0


def check(ident: str, *, limit: int | None = None) -> None:
    """Counts one request; raises Refusal 429 with `retry_after` in seconds once the minute's share
    is used up.

    `limit` is ORRERY_RATE_PER_MINUTE unless given; 0 is none.
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
        f"More than {limit} requests within a minute. Wait {wait_s} s; write points in batches of "
        "up to 10,000, and "
        "follow a run by its websocket in place of polling.",
        retry_after_s=wait_s,
    )


def _count(ident: str, window: int) -> int:
    global _redis_away_until
    if time.monotonic() >= _redis_away_until:
        try:
            key = f"orrery:rate:{ident}:{window}"
            pipeline = quick_client().pipeline(transaction=False)
            pipeline.incr(key)
            pipeline.expire(key, 2 * WINDOW_S)
            return int(pipeline.execute()[0])
        except (redis.RedisError, OSError):
            _redis_away_until = time.monotonic() + _AWAY_S
    return _count_here(ident, window)


def _count_here(ident: str, window: int) -> int:
    global _local_window
    with _lock:
        if window != _local_window:
            _local.clear()
            _local_window = window
        _local[ident] = _local.get(ident, 0) + 1
        return _local[ident]
