"""Limits wrong passwords per name and address, and per address.

Counts in Redis, shared by all web processes; in this process while Redis is unavailable.
"""

from __future__ import annotations

import hashlib
import threading
import time

import redis
from django.utils.translation import gettext as _

from orchestrator.common.errors import Refusal
from orchestrator.common.redis import quick_client

WINDOW_S = 300
PER_NAME = 10  # per name and address, so others cannot lock a user out
PER_ADDRESS = 60

_lock = threading.Lock()
_local: dict[str, int] = {}


def check(name: str, address: str) -> None:
    """Raise Refusal 429 after too many wrong passwords in this five-minute window."""
    for key, limit in _keys(name, address):
        if _count(key, 0) >= limit:
            wait_s = max(1, round((_window() + 1) * WINDOW_S - time.time()))
            raise Refusal(
                "too-many-logins",
                _("Too many wrong passwords"),
                429,
                _(
                    "Too many wrong passwords from this address. Wait %(minutes)s min, or ask an "
                    "administrator for a new password."
                )
                % {"minutes": -(-wait_s // 60)},
                retry_after_s=wait_s,
            )


def failed(name: str, address: str) -> None:
    """Count a wrong password."""
    for key, _limit in _keys(name, address):
        _count(key, 1)


def forget() -> None:
    """Clear this process's counts."""
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
