"""The ingest loop: reads the telemetry stream, commits each tick, then acknowledges it to writers.

An entry is acknowledged after its commit. After a crash it is read again and its known data is
dropped, so nothing is lost or stored twice. Does not depend on the content of points.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from django.db import DatabaseError, DataError, IntegrityError, connection
from redis.exceptions import ResponseError

from orchestrator.common import clock
from orchestrator.common.redis import client
from orchestrator.telemetry.prediction_checks import PredictionChecks
from orchestrator.telemetry.services import (
    Incoming,
    StoreResult,
    incoming_store,
    progress_publish,
)
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.decoding import Entry, EntryDecoder
from workers.contracts.wire import names

log = logging.getLogger(__name__)

TICK_S: Final = 0.1  # entries of this interval share one transaction and one live frame per run
_READ: Final = 64  # maximum number of entries per read; fewer if they are large
_TICK_BYTES: Final = 2_000_000  # of envelopes per tick: about 60,000 points, 150 ms
_BLOCK_MS: Final = 1000
_DEAD_MS: Final = 3000  # a live consumer reads at least every second
_PROGRESS_S: Final = 1.0
_BACKOFF_S: Final = (0.1, 0.5, 1.0, 2.0)  # while Redis or the database is unavailable
_REFUSED: Final = (DataError, IntegrityError, ValueError, OverflowError)


@dataclass(slots=True)
class Ingest:
    """One consumer of the telemetry stream's group. `run` works until `stop` is set."""

    stop: threading.Event = field(default_factory=threading.Event)
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    decoder: EntryDecoder = field(default_factory=EntryDecoder)
    ticks: int = 0
    _claimed: list[Entry] = field(default_factory=list)
    _claimed_at: float = 0.0  # when pending entries were last claimed
    _published: dict[int, float] = field(default_factory=dict)  # run → time of its last progress
    _deferred: dict[int, dict[str, Any]] = field(default_factory=dict)  # run → unpublished progress
    _checks: PredictionChecks = field(default_factory=PredictionChecks)
    _entry_bytes: float = 500_000.0  # moving average, to read at most one tick's worth at once

    def run(self) -> None:
        """Process ticks until `stop` is set; backs off while Redis or the database fails."""
        failures = 0
        while not self.stop.is_set():
            started = time.monotonic()
            try:
                self.tick()
                failures = 0
            except (redis.RedisError, OSError, DatabaseError) as error:
                log.warning(
                    "Ingest backing off; pending entries will be read again: %s: %s",
                    type(error).__name__,
                    error,
                )
                if isinstance(error, DatabaseError):
                    connection.close()
                self._claimed_at = 0.0
                self.stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            self.stop.wait(max(0.0, started + TICK_S - time.monotonic()))

    def tick(self) -> int:
        """Read, commit and acknowledge available entries; returns their number."""
        entries = self._read()
        if entries:
            results, attempt_ids = self._commit(entries)
            self._acknowledge(entries, results, attempt_ids)
            self.ticks += 1
            for result in results:
                self._checks.update(result.summaries)
        self._publish_deferred()
        return len(entries)

    def _read(self) -> list[Entry]:
        """Entries for one tick; claimed entries of a failed tick or a dead consumer come first."""
        redis_client = client()
        if time.monotonic() - self._claimed_at > 1.0:
            self._claim(redis_client)
            self._claimed_at = time.monotonic() if len(self._claimed) < _READ else 0.0
        entries, size = self._claimed, sum(_size(entry) for entry in self._claimed)
        self._claimed = []
        # wait for the first entry only if there is nothing else to do
        block = None if entries or self._deferred else _BLOCK_MS
        while size < _TICK_BYTES:
            count = max(1, min(_READ, int((_TICK_BYTES - size) / self._entry_bytes)))
            new = self._read_new(redis_client, count, block)
            if new is None:
                continue
            entries += new
            size += sum(_size(entry) for entry in new)
            if new:
                self._entry_bytes = 0.5 * self._entry_bytes + 0.5 * _size(new[-1])
            if len(new) < count:
                break
            block = None
        return entries

    def _read_new(
        self, redis_client: redis.Redis, count: int, block: int | None
    ) -> list[Entry] | None:
        """Up to `count` undelivered entries; None if the group was missing and is created again."""
        try:
            answer: Any = redis_client.xreadgroup(
                names.TELEMETRY_GROUP, self.name, {names.TELEMETRY: ">"}, count=count, block=block
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._claim(redis_client)
            return None
        return _parse_entries(answer)

    def _claim(self, redis_client: redis.Redis) -> None:
        """Claim unacknowledged entries: this consumer's own and those of a dead consumer."""
        try:
            redis_client.xgroup_create(
                names.TELEMETRY, names.TELEMETRY_GROUP, id="0", mkstream=True
            )
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        own: Any = redis_client.xreadgroup(
            names.TELEMETRY_GROUP, self.name, {names.TELEMETRY: "0"}, count=_READ
        )
        self._claimed = _parse_entries(own)
        consumers: Any = redis_client.xinfo_consumers(names.TELEMETRY, names.TELEMETRY_GROUP)
        for consumer in consumers:
            name = consumer["name"].decode()
            if name == self.name or consumer["idle"] < _DEAD_MS:
                continue
            if consumer["pending"] == 0:
                redis_client.xgroup_delconsumer(names.TELEMETRY, names.TELEMETRY_GROUP, name)
                continue
            answer: Any = redis_client.xautoclaim(
                names.TELEMETRY,
                names.TELEMETRY_GROUP,
                self.name,
                min_idle_time=_DEAD_MS,
                count=_READ,
            )
            log.info("Claimed %d entries of consumer %s", len(answer[1]), name)
            self._claimed += [Entry(*pair) for pair in answer[1] if pair[1]]
            break

    def _commit(self, entries: list[Entry]) -> tuple[list[StoreResult], dict[Writer, str]]:
        """Commit all entries together; if data is refused, one by one to drop only bad ones."""
        now = clock.now().timestamp()
        incoming, attempt_ids = self.decoder.decode(entries, now)
        try:
            return [self._store(incoming)], attempt_ids
        except _REFUSED:
            return list(self._store_each(entries, now)), attempt_ids

    def _store_each(self, entries: list[Entry], now: float) -> Iterator[StoreResult]:
        for entry in entries:
            try:
                yield self._store(self.decoder.decode([entry], now)[0])
            except _REFUSED as error:
                self.decoder.drop(entry, "refused", f"{type(error).__name__}: {error}")

    def _store(self, incoming: Incoming) -> StoreResult:
        now = time.monotonic()
        due = {
            run_id
            for run_id in incoming.run_ids()
            if now - self._published.get(run_id, 0.0) >= _PROGRESS_S
        }
        result = incoming_store(incoming, publish_progress=due)
        for run_id, summary in result.summaries.items():
            if run_id in due:
                self._published[run_id] = now
                self._deferred.pop(run_id, None)
            else:
                self._deferred[run_id] = summary
        return result

    def _publish_deferred(self) -> None:
        now = time.monotonic()
        due = {
            run_id: summary
            for run_id, summary in self._deferred.items()
            if now - self._published[run_id] >= _PROGRESS_S
        }
        if due:
            progress_publish(due)
            for run_id in due:
                self._published[run_id] = now
                del self._deferred[run_id]

    def _acknowledge(
        self, entries: list[Entry], results: list[StoreResult], attempt_ids: dict[Writer, str]
    ) -> None:
        """Publish each writer's last complete number, then acknowledge and delete the entries."""
        with client().pipeline(transaction=False) as pipe:
            keys = set()
            for key, field_name, number in _writer_acks(results, attempt_ids):
                pipe.hset(key, field_name, str(number))
                keys.add(key)
            for key in keys:
                pipe.expire(key, names.ACKED_TTL_S)
            ids = [entry.id for entry in entries]
            pipe.xack(names.TELEMETRY, names.TELEMETRY_GROUP, *ids)
            pipe.xdel(names.TELEMETRY, *ids)
            pipe.execute()


def _writer_acks(
    results: list[StoreResult], attempt_ids: dict[Writer, str]
) -> list[tuple[str, str, int]]:
    """`(key, field, number)` of every writer of the tick; a resend means that it missed one."""
    acks = []
    for result in results:
        streams = (
            (names.STREAM_POINTS, result.points),
            (names.STREAM_EVENTS, result.events),
            (names.STREAM_LOGS, result.lines),
        )
        for stream, stored in streams:
            for item in stored:
                key = names.acked_key(attempt_ids[item.writer])
                acks.append((key, names.acked_field(stream, item.writer.rank), item.complete_to))
    return acks


def _parse_entries(answer: Any) -> list[Entry]:
    """Entries of a read, in both forms that redis-py returns; omits deleted ones (no fields)."""
    if not answer:
        return []
    streams = answer.values() if isinstance(answer, dict) else [part for _, part in answer]
    parsed = []
    for part in streams:
        entries = part[0] if part and isinstance(part[0], list) else part
        parsed += [Entry(entry_id, fields) for entry_id, fields in entries if fields]
    return parsed


def _size(entry: Entry) -> int:
    return len(entry.fields.get(names.FIELD_MESSAGE.encode(), b""))
