"""Rate limit: requests per minute of a token, a session's user or an address.

Redis counts, shared by all web processes. A process takes a hundredth of a limit at a time, so that
not every request waits for Redis. While Redis is unreachable each process counts alone.
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
_SHARES = 100  # of a limit; several processes refuse at most a hundredth each too early
# after a failed call to Redis, so that not every request waits for a connection
_REDIS_PAUSE_S = 5.0

_lock = threading.Lock()
_local: dict[str, int] = {}  # requests since Redis was unreachable
_taken: dict[tuple[str, int], int] = {}  # requests that this process may still let pass
_window = 0  # of both
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
    if _passes(ident, window, limit):
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


def _passes(ident: str, window: int, limit: int) -> bool:
    global _redis_paused_until
    if _pass_taken((ident, limit), window):
        return True
    if time.monotonic() >= _redis_paused_until:
        share = max(1, limit // _SHARES)
        try:
            key = f"orrery:rate:{ident}:{window}"
            pipeline = quick_client().pipeline(transaction=False)
            pipeline.incrby(key, share)
            pipeline.expire(key, 2 * WINDOW_S)
            before = int(pipeline.execute()[0]) - share
        except (redis.RedisError, OSError):
            _redis_paused_until = time.monotonic() + _REDIS_PAUSE_S
        else:
            usable = min(share, limit - before)
            if usable > 1:
                with _lock:
                    _taken[ident, limit] = _taken.get((ident, limit), 0) + usable - 1
            return usable > 0
    return _count_locally(ident) <= limit


def _pass_taken(which: tuple[str, int], window: int) -> bool:
    """Use one of the requests that this process has taken from the limit of this minute."""
    global _window
    with _lock:
        if window != _window:
            _local.clear()
            _taken.clear()
            _window = window
        left = _taken.get(which, 0)
        if left:
            _taken[which] = left - 1
        return left > 0


def _count_locally(ident: str) -> int:
    with _lock:
        _local[ident] = _local.get(ident, 0) + 1
        return _local[ident]
