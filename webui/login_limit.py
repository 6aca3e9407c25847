"""How often a wrong password may be tried: per name and address, and per address. Knows no user and
no page.

Counts in Redis, so that all web processes count together, and in this process while Redis is away.
"""

from __future__ import annotations

import hashlib
import threading
import time

import redis

from orchestrator.common.errors import Refusal
from orchestrator.common.redis import quick_client

WINDOW_S = 300
PER_NAME = 10  # of one name from one address: nobody can lock another out from elsewhere
PER_ADDRESS = 60

_lock = threading.Lock()
_local: dict[str, int] = {}


def check(name: str, address: str) -> None:
    """Raises Refusal 429 once too many wrong passwords were tried in this window of five minutes."""
    for key, limit in _keys(name, address):
        if _count(key, 0) >= limit:
            wait_s = max(1, round((_window() + 1) * WINDOW_S - time.time()))
            raise Refusal(
                "too-many-logins",
                "Too many wrong passwords",
                429,
                f"Too many wrong passwords from here. Wait {-(-wait_s // 60)} min, or ask an "
                "admin for a new password.",
                retry_after_s=wait_s,
            )


def failed(name: str, address: str) -> None:
    for key, _ in _keys(name, address):
        _count(key, 1)


def forget() -> None:
    """Empties this process's own counts."""
    with _lock:
        _local.clear()


def _keys(name: str, address: str) -> list[tuple[str, int]]:
    window = _window()
    both = hashlib.sha256(f"{name}\0{address}".encode()).hexdigest()[:16]
    one = hashlib.sha256(address.encode()).hexdigest()[:16]
    return [
        (f"orrery:login:{both}:{window}", PER_NAME),
        (f"orrery:login:{one}:{window}", PER_ADDRESS),
    ]


def _window() -> int:
    return int(time.time() // WINDOW_S)


def _count(key: str, add: int) -> int:
    try:
        pipeline = quick_client().pipeline(transaction=False)
        pipeline.incrby(key, add)
        pipeline.expire(key, 2 * WINDOW_S)
        return int(pipeline.execute()[0])
    except (redis.RedisError, OSError):
        with _lock:
            if len(_local) > 10_000:
                _local.clear()
            _local[key] = _local.get(key, 0) + add
            return _local[key]
