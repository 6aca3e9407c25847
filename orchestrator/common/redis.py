"""Connections to Redis, and the word that wakes the scheduler. Does not know messages.

Redis carries news; the database remembers. So whoever tells something here after a commit never
fails when Redis is
away: the scheduler's timer finds the row a little later.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache

import redis
from django.conf import settings
from django.db import transaction
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from workers.contracts.wire import names

log = logging.getLogger(__name__)

# after a failed wake-up: each further try could hold a request for a connection timeout
_PAUSE_S = 1.0
_silent_until = 0.0


def client() -> redis.Redis:
    """For loops that read and write in earnest: answers in bytes, short timeouts, three quick
    retries.

    `socket_timeout` is 10 s, so blocking reads must ask for less. One pool per process, safe across
    fork and threads.
    """
    return _client(settings.REDIS_URL, 10.0, 3)


def quick_client() -> redis.Redis:
    """For requests of people: half a second and no retry, then an error to be swallowed."""
    return _client(settings.REDIS_URL, 0.5, 0)


def wake_scheduler() -> None:
    """After the current transaction commits, asks for a tick; several askers make one.

    Never raises.
    """
    transaction.on_commit(_wake, robust=True)


def reset() -> None:
    """Forgets connections, after the server's address changed."""
    global _silent_until
    _silent_until = 0.0
    for made in _made:
        made.close()
    _made.clear()
    _client.cache_clear()


_made: list[redis.Redis] = []


@lru_cache(maxsize=4)
def _client(url: str, timeout_s: float, retries: int) -> redis.Redis:
    made = redis.Redis.from_url(
        url,
        socket_connect_timeout=min(timeout_s, 2.0),
        socket_timeout=timeout_s,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        **(
            {}
            if url.startswith("unix:")
            else {"health_check_interval": 30, "socket_keepalive": True}
        ),
    )
    _made.append(made)
    return made


def _wake() -> None:
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    try:
        with quick_client().pipeline(transaction=False) as pipe:
            pipe.lpush(names.TICK, b"1")
            pipe.ltrim(names.TICK, 0, 0)
            pipe.execute()
    except (redis.RedisError, OSError) as error:
        _silent_until = time.monotonic() + _PAUSE_S
        log.warning("The scheduler was not woken, its timer will find the work: %s", error)
