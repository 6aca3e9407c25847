"""The refusal of requests that a busy web process cannot start soon, and how many there were.

All web processes count in Redis. Does not depend on threads, routes or users.
"""

from __future__ import annotations

import contextlib

import redis

from orchestrator.common.errors import Refusal
from orchestrator.common.redis import quick_client

RETRY_AFTER_S = 2
DETAIL = (
    "All threads of this web process are in use and too many requests wait. Nothing was changed. "
    "Try again in a few seconds."
)
_KEY = "orrery:web:refused"


def refusal() -> Refusal:
    """503 `overloaded` with `Retry-After`."""
    return Refusal("overloaded", "The server is busy", 503, DETAIL, retry_after_s=RETRY_AFTER_S)


def add_refused(count: int) -> None:
    """Add refused requests to the total; while Redis does not answer, only the log has them."""
    with contextlib.suppress(redis.RedisError, OSError):
        quick_client().incrby(_KEY, count)


def refused_total() -> int | None:
    """Requests that all web processes have refused; None if Redis does not answer."""
    try:
        return int(quick_client().get(_KEY) or 0)
    except (redis.RedisError, OSError):
        return None
