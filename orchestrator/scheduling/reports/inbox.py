"""Reads reports of all nodes and wake-ups in two threads into one bounded queue.

Delivers at least once: entries are acknowledged after their effect is committed; a later reader
reads the others again. Nodes have equal turns. Survives restarts of Redis with or without data.
Does not depend on the content of messages.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import redis
from redis.exceptions import ResponseError

from orchestrator.common.stream_groups import GroupReader, StreamEntry
from orchestrator.dead_letters import retry_stamp
from workers.contracts.wire import names

log = logging.getLogger(__name__)
_QUEUE: Final = 400  # entries
_ACKNOWLEDGE: Final = 200  # entries at once
_TURN: Final = 20  # entries of one stream per read
_READ_BYTES: Final = 4_000_000
_MAX_WAIT_S = 2.0
# between two reads if nothing is left: reading costs about 1 µs per stream at the broker
_PAUSE_S: Final = 0.02
_PAUSE_PER_STREAM_S: Final = 0.0002
_SHARED: Final = (names.JOINS, names.REPORTS)


class Entry(NamedTuple):
    """One report, or a wake-up if there is no `source`."""

    source: StreamEntry | None
    text: bytes
    claimed: bool = False  # an earlier reader did not acknowledge it
    retried: float | None = None  # Unix seconds of the first writing, of a retried dead letter

    @property
    def written(self) -> float:
        """Unix seconds by Redis's clock; 0 for a wake-up."""
        if self.retried is not None:
            return self.retried
        return int(self.source.id.split(b"-")[0]) / 1000 if self.source else 0.0


class Inbox:
    """Reports and wake-ups of one consumer; `watch` names the nodes whose streams it reads."""

    def __init__(self, connect: Callable[[], redis.Redis], *, consumer: str) -> None:
        self._connect = connect
        self._reader = GroupReader(names.REPORTS_GROUP, consumer)
        self._queue: queue.Queue[Entry] = queue.Queue(maxsize=_QUEUE)
        self._stopping = threading.Event()
        self._acks: list[StreamEntry] = []
        self._client: redis.Redis | None = None
        self._threads: list[threading.Thread] = []
        self._streams: list[str] = []
        self._read_all = False  # the last read returned everything that the streams had

    def start(self, nodes: Iterable[str] = ()) -> None:
        """Start the reader threads."""
        self.watch(nodes)
        for target in (self._read_reports, self._read_wakes):
            thread = threading.Thread(
                target=self._forever, args=(target,), name=target.__name__.strip("_"), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def watch(self, nodes: Iterable[str]) -> None:
        """Read the streams of these nodes, besides the shared ones."""
        streams = [*_SHARED, *map(names.reports_stream, nodes)]
        if streams != self._streams:
            self._read_all = False
            self._streams = streams

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

    @property
    def drained(self) -> bool:
        """Whether every report that has arrived was handed out."""
        return self._read_all and self._queue.empty()

    def acknowledge(self, entry: StreamEntry) -> None:
        """Acknowledge an entry whose effect is committed; sent with the next `flush`."""
        self._acks.append(entry)
        if len(self._acks) >= _ACKNOWLEDGE:
            self.flush()

    def flush(self) -> None:
        """Acknowledge and delete handled entries; retried while Redis is unavailable."""
        if not self._acks:
            return
        try:
            self._client = self._client or self._connect()
            self._reader.acknowledge(self._client, self._acks)
            self._acks.clear()
        except ResponseError:  # the server lost its data, and so the group
            self._acks.clear()
        except (redis.RedisError, OSError):
            # entries without acknowledgement are only read again
            self._acks = self._acks[-10 * _ACKNOWLEDGE :]

    def _forever(self, target: Callable[[redis.Redis], None]) -> None:
        wait_s = 0.1
        while not self._stopping.is_set():
            client = self._connect()
            try:
                target(client)
                wait_s = 0.1
            except (redis.RedisError, OSError) as error:
                self._read_all = False
                if wait_s == 0.1:
                    log.warning("Redis is unavailable; the timer continues alone: %s", error)
                self._stopping.wait(wait_s)
                wait_s = min(_MAX_WAIT_S, wait_s * 2)
            finally:
                client.close()

    def _read_reports(self, client: redis.Redis) -> None:
        """Read what earlier readers did not acknowledge of each stream, then new entries."""
        known: set[str] = set()
        while not self._stopping.is_set():
            streams = self._streams
            if unknown := [name for name in streams if name not in known]:
                self._read_unacknowledged(client, unknown)
                known = {*streams}
            reading = self._reader.read(client, streams, count=_TURN, limit_bytes=_READ_BYTES)
            self._put(reading.entries, claimed=False)
            self._read_all = not reading.cut and streams is self._streams
            if not reading.cut:
                self._stopping.wait(max(_PAUSE_S, _PAUSE_PER_STREAM_S * len(streams)))

    def _read_unacknowledged(self, client: redis.Redis, streams: list[str]) -> None:
        """Entries that ended schedulers did not acknowledge, and those of this one.

        The lease ensures that no other scheduler is running.
        """
        positions = dict.fromkeys(streams, "0")
        more = True
        while more and not self._stopping.is_set():
            _, more = self._reader.claim(
                client, streams, count=_TURN, limit_bytes=_READ_BYTES, dead_s=0.0
            )
        while positions and not self._stopping.is_set():
            reading = self._reader.read_pending(
                client, positions, count=_TURN, limit_bytes=_READ_BYTES
            )
            self._put(reading.entries, claimed=True)
            last = {entry.stream: entry.id.decode() for entry in reading.entries}
            positions = {name: last.get(name, positions[name]) for name in reading.cut}

    def _read_wakes(self, client: redis.Redis) -> None:
        while not self._stopping.is_set():
            if client.blpop([names.TICK], timeout=2):
                self._put_entry(Entry(None, b""))

    def _put(self, entries: Iterable[StreamEntry], *, claimed: bool) -> None:
        for entry in entries:
            text = entry.fields.get(names.FIELD_MESSAGE.encode(), b"")
            retried = retry_stamp.first_written(entry.fields, text)
            self._put_entry(Entry(entry, text, claimed, retried))

    def _put_entry(self, entry: Entry) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(entry, timeout=0.5)
                return
            except queue.Full:
                time.sleep(0.01)
