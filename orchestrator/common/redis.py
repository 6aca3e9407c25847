"""Connections to Redis, and the wake-up of the scheduler.

Redis only notifies; the database is the source of truth. A wake-up therefore never fails if Redis
is unreachable: the scheduler's timer finds the row later.
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
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)

# after a failed wake-up, because each further attempt can block for a connection timeout
_PAUSE_S = 1.0
_silent_until = 0.0


def client() -> redis.Redis:
    """The client of loops: responses in bytes, short timeouts, three quick retries.

    `socket_timeout` is 10 s, so blocking reads must use less. One pool per process, safe across
    forks and threads.
    """
    return _client(settings.REDIS_URL, 10.0, 3)


def quick_client() -> redis.Redis:
    """The client of web requests: 0.5 s timeout and no retry; callers ignore its errors."""
    return _client(settings.REDIS_URL, 0.5, 0)


def wake_scheduler() -> None:
    """Request a tick after the current transaction commits; requests coalesce. Never raises."""
    transaction.on_commit(_wake, robust=True)


def reset() -> None:
    """Close all connections, after the server's address changed."""
    global _silent_until
    _silent_until = 0.0
    for client in _clients:
        client.close()
    _clients.clear()
    _client.cache_clear()


_clients: list[redis.Redis] = []


@lru_cache(maxsize=4)
def _client(url: str, timeout_s: float, retries: int) -> redis.Redis:
    client = redis.Redis.from_url(
        url,
        socket_connect_timeout=min(timeout_s, 2.0),
        socket_timeout=timeout_s,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        **tls_options(url),
        **(
            {}
            if url.startswith("unix:")
            else {"health_check_interval": 30, "socket_keepalive": True}
        ),
    )
    _clients.append(client)
    return client


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
        log.warning("The scheduler was not woken; its timer will find the work: %s", error)
