"""Reads the reports stream and wake-ups in two threads into one bounded queue.

Delivers at least once: entries are acknowledged after their effect is committed; a later reader
reads the others again. Survives restarts of Redis with or without data. Does not depend on the
content of messages.
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
_CLAIM_COUNT = 1000
_BLOCK_MS = 2000
_MAX_WAIT_S = 2.0


class Entry(NamedTuple):
    """One report, or a wake-up if there is no `id`."""

    id: bytes | None
    text: bytes


class Inbox:
    """Reports and wake-ups of one consumer."""

    def __init__(self, connect: Callable[[], redis.Redis], *, consumer: str) -> None:
        self._connect, self._consumer = connect, consumer
        self._queue: queue.Queue[Entry] = queue.Queue(maxsize=2 * _READ)
        self._stopping = threading.Event()
        self._acks: list[bytes] = []
        self._client: redis.Redis | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the reader threads."""
        for target in (self._read_reports, self._read_wakes):
            thread = threading.Thread(
                target=self._forever, args=(target,), name=target.__name__.strip("_"), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop the reader threads and wake `get`."""
        self._stopping.set()
        self._queue.put_nowait(Entry(None, b"")) if not self._queue.full() else None

    def get(self, timeout_s: float) -> Entry | None:
        """The next entry; None after the timeout."""
        try:
            return (
                self._queue.get(timeout=max(0.0, timeout_s))
                if timeout_s > 0
                else self._queue.get_nowait()
            )
        except queue.Empty:
            return None

    def acknowledge(self, id: bytes) -> None:
        """Acknowledge an entry whose effect is committed; sent with the next `flush`."""
        self._acks.append(id)
        if len(self._acks) >= _READ:
            self.flush()

    def flush(self) -> None:
        """Acknowledge and delete handled entries; retried while Redis is unavailable."""
        if not self._acks:
            return
        try:
            self._client = self._client or self._connect()
            with self._client.pipeline(transaction=False) as pipe:
                pipe.xack(names.REPORTS, names.REPORTS_GROUP, *self._acks)
                pipe.xdel(names.REPORTS, *self._acks)
                pipe.execute()
            self._acks.clear()
        except ResponseError:  # the server lost its data, and so the group
            self._acks.clear()
        except (redis.RedisError, OSError):
            # entries without acknowledgement are only read again
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
                    log.warning("Redis is unavailable; the timer continues alone: %s", error)
                self._stopping.wait(wait_s)
                wait_s = min(_MAX_WAIT_S, wait_s * 2)
            finally:
                client.close()

    def _read_reports(self, client: redis.Redis) -> None:
        try:
            client.xgroup_create(names.REPORTS, names.REPORTS_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._claim_pending(client)
        # first entries that this reader has not acknowledged, then new ones
        after: bytes | str = "0"
        while not self._stopping.is_set():
            answer: Any = client.xreadgroup(
                names.REPORTS_GROUP,
                self._consumer,
                {names.REPORTS: after},
                count=_READ,
                block=_BLOCK_MS,
            )
            entries = answer[0][1] if answer else []
            for id, fields in entries:
                self._put(Entry(id, (fields or {}).get(names.FIELD_MESSAGE.encode(), b"")))
            if after != ">":
                after = entries[-1][0] if entries else ">"

    def _claim_pending(self, client: redis.Redis) -> None:
        """Claim entries of dead schedulers: the lease ensures that there is no other reader."""
        start: Any = "0-0"
        while True:
            # with justid, redis-py returns a plain list of ids
            ids: Any = client.xautoclaim(
                names.REPORTS,
                names.REPORTS_GROUP,
                self._consumer,
                0,
                start_id=start,
                count=_CLAIM_COUNT,
                justid=True,
            )
            if len(ids) < _CLAIM_COUNT:
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
