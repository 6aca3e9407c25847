"""Counts how often an entry of a stream failed, in Redis, across restarts of its readers.

The count rises before the attempt and is removed after success, so an entry that ends the process
counts as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis

MAX_FAILURES: Final = 3
_TTL_S: Final = 24 * 3600


def begin(client: redis.Redis, stream: str, entry: bytes) -> int:
    """Count an attempt to process the entry; the number of attempts including this one."""
    return begin_all(client, stream, [entry])[0]


def begin_all(client: redis.Redis, stream: str, entries: Sequence[bytes]) -> list[int]:
    """Count an attempt to process the entries together; each one's number of attempts."""
    with client.pipeline(transaction=False) as pipe:
        for entry in entries:
            pipe.hincrby(_key(stream), entry.decode(), 1)
        pipe.expire(_key(stream), _TTL_S)
        counts: Any = pipe.execute()[:-1]
    return [int(count) for count in counts]


def undo(client: redis.Redis, stream: str, *entries: bytes) -> None:
    """Take back an attempt that did not take place, or that an outage ended."""
    with client.pipeline(transaction=False) as pipe:
        for entry in entries:
            pipe.hincrby(_key(stream), entry.decode(), -1)
        pipe.execute()


def succeed(client: redis.Redis, stream: str, *entries: bytes) -> None:
    """Remove the counts of entries that are processed or recorded as dead letters."""
    if entries:
        client.hdel(_key(stream), *(entry.decode() for entry in entries))


def counted(client: redis.Redis, stream: str) -> set[bytes]:
    """Entries with failures."""
    fields: Any = client.hkeys(_key(stream))
    return {bytes(field) for field in fields}


def _key(stream: str) -> str:
    return f"{stream}:failures"
