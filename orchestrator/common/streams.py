"""Trims Redis streams to what their readers have not acknowledged, and repairs their ids.

Readers delete each entry with its acknowledgement; a connection that breaks between the two leaves
entries behind. Does not depend on the content of entries.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

import redis
from redis.exceptions import ResponseError

FORGET_S: Final = 24 * 3600.0  # after its last read, an ended consumer is forgotten
_FUTURE_MS: Final = 3_600_000  # a writer chose ids that are further ahead of the clock


def clean(client: redis.Redis, streams: Iterable[str]) -> int:
    """Delete entries that every group acknowledged, and names of consumers that ended.

    An empty stream whose next id a writer moved far ahead is deleted: a lower id could not be
    appended to it. Returns how many entries were deleted.
    """
    names = list(streams)
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.xinfo_stream(name)
        infos = pipe.execute(raise_on_error=False)
    now_ms = time.time() * 1000
    deleted = 0
    for name, info in zip(names, infos, strict=True):
        if isinstance(info, Exception):
            continue
        if info["length"]:
            deleted += trim(client, name)
        elif milliseconds_of(info["last-generated-id"]) > now_ms + _FUTURE_MS:
            _delete_empty(client, name)
        _remove_consumers(client, name)
    return deleted


def trim(client: redis.Redis, stream: str) -> int:
    """Delete the entries that every group of the stream has acknowledged; returns how many.

    Keeps everything of a stream that no group reads. Raises errors of the connection.
    """
    try:
        groups: Any = client.xinfo_groups(stream)
    except ResponseError:  # the stream does not exist
        return 0
    ends = [_acknowledged_before(client, stream, group) for group in groups]
    return int(client.xtrim(stream, minid=_text(min(ends)), approximate=False)) if ends else 0


def _delete_empty(client: redis.Redis, stream: str) -> None:
    """Delete a stream unless an entry arrives meanwhile."""
    with client.pipeline() as pipe:
        pipe.watch(stream)  # type: ignore[no-untyped-call]
        if pipe.xlen(stream):
            return
        pipe.multi()
        pipe.delete(stream)
        try:
            pipe.execute()
        except redis.WatchError:
            return


def _remove_consumers(client: redis.Redis, stream: str) -> None:
    """Remove consumers without entries that have not read for a day."""
    try:
        groups: Any = client.xinfo_groups(stream)
        for group in groups:
            consumers: Any = client.xinfo_consumers(stream, group["name"])
            for consumer in consumers:
                if not consumer["pending"] and consumer["idle"] > FORGET_S * 1000:
                    client.xgroup_delconsumer(stream, group["name"], consumer["name"])
    except ResponseError:  # the stream does not exist any more
        return


def _acknowledged_before(
    client: redis.Redis, stream: str, group: dict[str, Any]
) -> tuple[int, int]:
    """The first id that the group has not acknowledged."""
    milliseconds, number = _id(group["last-delivered-id"])
    pending: Any = client.xpending(stream, group["name"])
    oldest = pending["min"]
    following = (milliseconds, number + 1)
    return min(_id(oldest), following) if oldest else following


def _id(text: bytes | str) -> tuple[int, int]:
    parts = text.decode() if isinstance(text, bytes) else text
    milliseconds, _, number = parts.partition("-")
    return int(milliseconds), int(number or 0)


def milliseconds_of(id: bytes | str) -> int:
    """Unix milliseconds of an entry's id, by the clock that chose it."""
    return _id(id)[0]


def _text(id: tuple[int, int]) -> str:
    return f"{id[0]}-{id[1]}"
