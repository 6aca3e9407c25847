"""The ingest loop: reads telemetry of all nodes, commits each tick, then acknowledges it.

An entry is acknowledged after its commit. After a crash it is read again and its known data is
dropped, so nothing is lost or stored twice. An entry that fails three times becomes a dead letter.
`backlog` shares ticks between runs.
Does not depend on the content of points.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from django.db import DatabaseError, InterfaceError, connection

from orchestrator.common import clock, streams
from orchestrator.common.redis import client
from orchestrator.common.stream_groups import GroupReader, StreamEntry
from orchestrator.dead_letters import failure_counts
from orchestrator.dead_letters.outages import is_outage
from orchestrator.fleet.selectors import node_names
from orchestrator.telemetry.backlog import Backlog, size_of
from orchestrator.telemetry.prediction_checks import PredictionChecks
from orchestrator.telemetry.services import (
    Incoming,
    StoreResult,
    incoming_store,
    progress_publish,
    summaries_refresh,
)
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.decoding import Entry, EntryDecoder
from workers.contracts.wire import names

log = logging.getLogger(__name__)

TICK_S: Final = 0.1  # entries of this interval share one transaction and one live frame per run
_TURN: Final = 500  # entries of one stream per read
_CLAIM: Final = 64  # entries of ended processes at once
_TICK_BYTES: Final = 2_000_000  # of envelopes per tick: about 60,000 points, 150 ms
_AHEAD_BYTES: Final = 8_000_000  # read per tick to find other runs' entries behind a flood
_PROGRESS_S: Final = 1.0
_CLEAN_S: Final = 60.0
_SUMMARY_S: Final = 1.0  # between looks for runs without current metric summaries
_SUMMARY_BUSY_S: Final = 5.0  # while points wait for this process
_BACKOFF_S: Final = (0.1, 0.5, 1.0, 2.0)  # while Redis or the database is unavailable


@dataclass(slots=True)
class Ingest:
    """One consumer of the group of the telemetry streams. `run` works until `stop` is set."""

    stop: threading.Event = field(default_factory=threading.Event)
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    decoder: EntryDecoder = field(default_factory=EntryDecoder)
    ticks: int = 0
    _backlog: Backlog = field(default_factory=Backlog)
    _claimed: list[Entry] = field(default_factory=list)
    _claimed_at: float = 0.0  # when pending entries were last claimed
    # where to continue reading what this consumer was given and did not receive, because its
    # process or a connection ended: positions by stream, empty: the start; None: all is read
    _left_from: dict[str, str] | None = field(default_factory=dict)
    _first_claim: bool = True
    _failed: list[Entry] = field(default_factory=list)  # stored again with the next claim
    _clean_due: float = 0.0
    _summary_due: float = 0.0
    _streams: list[str] = field(default_factory=list)
    # entries that failed, or ended the process: each is stored alone, with a count of failures
    _suspects: set[bytes] = field(default_factory=set)
    # entries whose reader ended, perhaps because of one of them: counted while stored together
    _inherited: set[bytes] = field(default_factory=set)
    _published: dict[int, float] = field(default_factory=dict)  # run → time of its last progress
    _deferred: dict[int, dict[str, Any]] = field(default_factory=dict)  # run → unpublished progress
    _checks: PredictionChecks = field(default_factory=PredictionChecks)
    _reader: GroupReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = GroupReader(names.TELEMETRY_GROUP, self.name)

    def run(self) -> None:
        """Process ticks until `stop` is set; backs off while Redis or the database fails."""
        failures = 0
        while not self.stop.is_set():
            started = time.monotonic()
            try:
                self.tick()
                failures = 0
            except (redis.RedisError, OSError, DatabaseError, InterfaceError) as error:
                log.warning(
                    "Ingest backing off; pending entries will be read again: %s: %s",
                    type(error).__name__,
                    error,
                )
                if isinstance(error, DatabaseError | InterfaceError):
                    connection.close()
                self._claimed_at, self._left_from = 0.0, {}
                self.stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            self.stop.wait(max(0.0, started + TICK_S - time.monotonic()))

    def tick(self) -> int:
        """Read, commit and acknowledge available entries; returns their number."""
        self._backlog.add(self._read())
        self._read_ahead()
        entries = self._backlog.take(_TICK_BYTES, self._fetch)
        if entries:
            try:
                done, results, attempt_ids = self._commit(entries)
                if done:
                    self._acknowledge(done, results, attempt_ids)
            except BaseException:
                self._backlog.add(entries, first=True)
                raise
            self.ticks += 1
            for result in results:
                self._checks.update(result.summaries)
        self._publish_deferred()
        self._summarize()
        self._clean()
        return len(entries)

    def _summarize(self) -> None:
        """Compute the metric summaries of one run; seldom while points wait."""
        now = time.monotonic()
        if now < self._summary_due:
            return
        busy, refreshed = self._backlog.waiting_bytes > 0, summaries_refresh()
        self._summary_due = now + (_SUMMARY_BUSY_S if busy else 0.0 if refreshed else _SUMMARY_S)

    def _clean(self) -> None:
        """Delete entries that were acknowledged, but not deleted because a connection broke."""
        if time.monotonic() < self._clean_due:
            return
        self._clean_due = time.monotonic() + _CLEAN_S
        if deleted := streams.clean(client(), self._streams):
            log.info("Deleted %d acknowledged entries of telemetry", deleted)

    def _read(self) -> list[Entry]:
        """New entries for one tick; claimed entries of a failed tick or a dead consumer first."""
        redis_client = client()
        if time.monotonic() - self._claimed_at > 1.0:
            self._streams = [names.TELEMETRY, *map(names.telemetry_stream, node_names())]
            more = self._claim(redis_client)
            self._claimed_at = 0.0 if more else time.monotonic()
        entries, size = self._claimed, sum(size_of(entry) for entry in self._claimed)
        self._claimed = []
        if size < _TICK_BYTES:
            entries += self._read_new(redis_client, _TICK_BYTES - size)
        return entries

    def _read_ahead(self) -> None:
        """Read further while more waits than a tick stores, so that every run has its share."""
        ahead = 0
        while (
            self._backlog.waiting_bytes > _TICK_BYTES
            and ahead < _AHEAD_BYTES
            and not self._backlog.full
        ):
            new = self._read_new(client(), _TICK_BYTES)
            if not new:
                return
            ahead += sum(size_of(entry) for entry in new)
            self._backlog.add(new)

    def _fetch(self, keys: list[tuple[str, bytes]]) -> list[Entry]:
        """Entries that the backlog does not hold in memory."""
        with client().pipeline(transaction=False) as pipe:
            for stream, id in keys:
                pipe.xrange(stream, id, id)
            answers: Any = pipe.execute()
        return [
            Entry(id, fields, stream)
            for (stream, _), answer in zip(keys, answers, strict=True)
            for id, fields in answer
            if fields
        ]

    def _read_new(self, redis_client: redis.Redis, limit_bytes: int) -> list[Entry]:
        """Undelivered entries, an equal share of each node's."""
        reading = self._reader.read(
            redis_client, self._streams, count=_TURN, limit_bytes=limit_bytes
        )
        return _parsed(reading.entries)

    def _claim(self, redis_client: redis.Redis) -> bool:
        """Take unacknowledged entries: failed ones, and those of ended processes.

        Returns whether there may be more.
        """
        self._claimed, self._failed = self._failed, []
        if self._left_from is not None:
            start = self._left_from or dict.fromkeys(self._streams, "0")
            reading = self._reader.read_pending(
                redis_client, start, count=_CLAIM, limit_bytes=_TICK_BYTES
            )
            entries = _parsed(reading.entries)
            last = {entry.stream: entry.id.decode() for entry in entries}
            left = {name: last.get(name, start[name]) for name in reading.cut}
            self._left_from = left or None
            if self._first_claim:  # of an earlier process with the same name
                self._inherited.update(entry.key for entry in entries)
                self._first_claim = bool(left)
            self._claimed += entries
        taken, more = self._reader.claim(
            redis_client, self._streams, count=_CLAIM, limit_bytes=_TICK_BYTES
        )
        if taken:
            log.info("Claimed %d entries of consumers that ended", len(taken))
        claimed = _parsed(taken)
        self._inherited.update(entry.key for entry in claimed)
        self._claimed += claimed
        return more or self._left_from is not None

    def _commit(
        self, entries: list[Entry]
    ) -> tuple[list[Entry], list[StoreResult], dict[Writer, str]]:
        """Commit the entries together, or each alone if that fails or they are suspects.

        Returns the entries that are stored, or recorded as dead letters, with the results and each
        writer's attempt id.
        """
        now = clock.now().timestamp()
        inherited = self._begin_inherited(entries)
        alone = [entry for entry in entries if entry.key in self._suspects]
        together = [entry for entry in entries if entry.key not in self._suspects]
        done: list[Entry] = []
        results: list[StoreResult] = []
        attempt_ids: dict[Writer, str] = {}
        if together:
            try:
                incoming, attempt_ids = self.decoder.decode(together, now)
                results.append(self._store(incoming))
                done = together
            except Exception as error:
                if inherited:
                    failure_counts.undo(client(), names.TELEMETRY, *inherited)
                if is_outage(error):
                    raise
                log.warning("Entries are stored one by one: %s: %s", type(error).__name__, error)
                alone = together + alone
            else:
                failure_counts.succeed(client(), names.TELEMETRY, *inherited)
            self._inherited.difference_update(inherited)
        for entry in alone:
            stored = self._store_alone(entry, now)
            if stored is None:
                continue
            done.append(entry)
            results.append(stored[0])
            attempt_ids.update(stored[1])
        return done, results, attempt_ids

    def _begin_inherited(self, entries: list[Entry]) -> list[bytes]:
        """Count an attempt to store inherited entries together; their ids.

        Those that an earlier process did not survive become suspects.
        """
        ids = [entry.key for entry in entries if entry.key in self._inherited]
        if not ids:
            return []
        counts = failure_counts.begin_all(client(), names.TELEMETRY, ids)
        failed = [id for id, count in zip(ids, counts, strict=True) if count > 1]
        if failed:
            failure_counts.undo(client(), names.TELEMETRY, *failed)
            self._suspects.update(failed)
            self._inherited.difference_update(failed)
        return [id for id in ids if id in self._inherited]

    def _store_alone(
        self, entry: Entry, now: float
    ) -> tuple[StoreResult, dict[Writer, str]] | None:
        """Store one entry; None if it failed and is tried again.

        After MAX_FAILURES it becomes a dead letter and counts as done.
        """
        redis_client, empty = client(), StoreResult([], [], [], {})
        count = failure_counts.begin(redis_client, names.TELEMETRY, entry.key)
        answer: tuple[StoreResult, dict[Writer, str]] = empty, {}
        if count > failure_counts.MAX_FAILURES:
            self.decoder.drop(entry, "failed", f"Each of {count - 1} attempts ended the process.")
        else:
            try:
                incoming, attempt_ids = self.decoder.decode([entry], now)
                answer = self._store(incoming), attempt_ids
            except Exception as error:
                if is_outage(error):
                    failure_counts.undo(redis_client, names.TELEMETRY, entry.key)
                    raise
                reason = f"{type(error).__name__}: {error}"
                if count < failure_counts.MAX_FAILURES:
                    log.warning("Entry %s failed %d times: %s", entry.id.decode(), count, reason)
                    self._suspects.add(entry.key)
                    self._failed.append(entry)
                    return None
                self.decoder.drop(entry, "failed", reason)
        failure_counts.succeed(redis_client, names.TELEMETRY, entry.key)
        self._suspects.discard(entry.key)
        return answer

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
            pipe.execute()
        self._reader.acknowledge(client(), [entry.source for entry in entries])


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


def _parsed(entries: list[StreamEntry]) -> list[Entry]:
    return [Entry(entry.id, entry.fields, entry.stream) for entry in entries]
