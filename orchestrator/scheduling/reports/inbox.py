"""Entries of the reports stream and wake-ups, read by two threads into one bounded queue.

At least once: `done` acknowledges an entry after its effect is committed; what an earlier reader
left is read again.
Survives a Redis that restarts, with or without its data. Knows no message.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import redis
from redis.exceptions import ResponseError

from workers.contracts.wire import names

log = logging.getLogger(__name__)
_READ = 200
_CLAIM = 1000
_BLOCK_MS = 2000
_LONGEST_WAIT_S = 2.0


class Entry(NamedTuple):
    """One report, or a wake-up where `id` is None."""

    id: bytes | None
    text: bytes


class Inbox:
    def __init__(self, connect: Callable[[], redis.Redis], *, consumer: str) -> None:
        self._connect, self._consumer = connect, consumer
        self._queue: queue.Queue[Entry] = queue.Queue(maxsize=2 * _READ)
        self._stopping = threading.Event()
        self._acks: list[bytes] = []
        self._client: redis.Redis | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for target in (self._read_reports, self._read_wakes):
            thread = threading.Thread(
                target=self._forever, args=(target,), name=target.__name__.strip("_"), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stopping.set()
        self._queue.put_nowait(Entry(None, b"")) if not self._queue.full() else None

    def get(self, timeout_s: float) -> Entry | None:
        try:
            return (
                self._queue.get(timeout=max(0.0, timeout_s))
                if timeout_s > 0
                else self._queue.get_nowait()
            )
        except queue.Empty:
            return None

    def done(self, id: bytes) -> None:
        """The entry's effect is committed."""
        self._acks.append(id)
        if len(self._acks) >= _READ:
            self.flush()

    def flush(self) -> None:
        """Acknowledge and delete what is done with; kept for later while Redis is away."""
        if not self._acks:
            return
        try:
            self._client = self._client or self._connect()
            with self._client.pipeline(transaction=False) as pipe:
                pipe.xack(names.REPORTS, names.REPORTS_GROUP, *self._acks)
                pipe.xdel(names.REPORTS, *self._acks)
                pipe.execute()
            self._acks.clear()
        except ResponseError:  # the group is gone with the server's data
            self._acks.clear()
        except (redis.RedisError, OSError):
            # what is forgotten here is read and dropped once more
            self._acks = self._acks[-10 * _READ :]

    def _forever(self, target: Callable[[redis.Redis], None]) -> None:
        wait_s = 0.1
        while not self._stopping.is_set():
            client = self._connect()
            try:
                target(client)
                wait_s = 0.1
            except (redis.RedisError, OSError) as error:
                if wait_s == 0.1:
                    log.warning("Redis is away, the timer goes on alone: %s", error)
                self._stopping.wait(wait_s)
                wait_s = min(_LONGEST_WAIT_S, wait_s * 2)
            finally:
                client.close()

    def _read_reports(self, client: redis.Redis) -> None:
        try:
            client.xgroup_create(names.REPORTS, names.REPORTS_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._take_over(client)
        # first what this reader had taken and not finished, then what is new
        after: bytes | str = "0"
        while not self._stopping.is_set():
            found: Any = client.xreadgroup(
                names.REPORTS_GROUP,
                self._consumer,
                {names.REPORTS: after},
                count=_READ,
                block=_BLOCK_MS,
            )
            entries = found[0][1] if found else []
            for id, fields in entries:
                self._put(Entry(id, (fields or {}).get(names.FIELD_MESSAGE.encode(), b"")))
            if after != ">":
                after = entries[-1][0] if entries else ">"

    def _take_over(self, client: redis.Redis) -> None:
        """Entries that a dead scheduler had taken: the caller holds the lease, so no other reader
        lives.
        """
        start: Any = "0-0"
        while True:
            # with justid redis-py answers a plain list of ids
            ids: Any = client.xautoclaim(
                names.REPORTS,
                names.REPORTS_GROUP,
                self._consumer,
                0,
                start_id=start,
                count=_CLAIM,
                justid=True,
            )
            if len(ids) < _CLAIM:
                break
            start = ids[-1]
        for other in client.xinfo_consumers(names.REPORTS, names.REPORTS_GROUP):
            if (
                other["name"] not in (self._consumer, self._consumer.encode())
                and other["pending"] == 0
            ):
                client.xgroup_delconsumer(names.REPORTS, names.REPORTS_GROUP, other["name"])

    def _read_wakes(self, client: redis.Redis) -> None:
        while not self._stopping.is_set():
            if client.blpop([names.TICK], timeout=2):
                self._put(Entry(None, b""))

    def _put(self, entry: Entry) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(entry, timeout=0.5)
                return
            except queue.Full:
                time.sleep(0.01)
