"""The ingest loop: reads the telemetry stream, commits a tick at a time, then tells the writers how
far they are.

An entry is acknowledged after its commit. Whatever dies in between is read again and dropped as
known, so nothing is
lost and nothing doubled. Does not know what a point is.
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
from django.db import DatabaseError, DataError, IntegrityError, connection
from redis.exceptions import ResponseError

from orchestrator.common import clock
from orchestrator.common.redis import client
from orchestrator.runs.models import Run
from orchestrator.telemetry.outcome import EARLY, misses_tell
from orchestrator.telemetry.services import Kept, news_store, progress_tell
from orchestrator.telemetry.slow import slow_tell
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.deliveries import Entry, Opener
from workers.contracts.wire import names

log = logging.getLogger(__name__)

TICK_S: Final = 0.1  # entries of so long make one transaction and one live frame a run
_READ: Final = 64  # entries a read at most; fewer where they are large
_TICK_BYTES: Final = 2_000_000  # of envelopes a tick: some 60,000 points, 150 ms
_BLOCK_MS: Final = 1000
_DEAD_MS: Final = 3000  # a living consumer reads at least every second
_PROGRESS_S: Final = 1.0
_REMEMBERED: Final = 2000  # attempts
_AGAIN: Final = 1 << 62  # added to a step: only the speed is still to be judged
_REST_S: Final = (0.1, 0.5, 1.0, 2.0)  # between tries while Redis or the database is away


@dataclass(slots=True)
class Ingest:
    """One consumer of the group.

    `run` works until `stop` is set; `tick` does one round and tells how many entries.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    opener: Opener = field(default_factory=Opener)
    ticks: int = 0
    _claimed: list[Entry] = field(default_factory=list)
    _looked: float = 0.0  # for dead consumers' entries
    # run → when its progress was last told to everybody
    _told: dict[int, float] = field(default_factory=dict)
    _owed: dict[int, dict[str, Any]] = field(default_factory=dict)  # run → progress not told yet
    _judged: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # run and attempt → step at which to judge, 0: done
    _entry_bytes: float = 500_000.0  # of late, to read no more than a tick's worth at once

    def run(self) -> None:
        failures = 0
        while not self.stop.is_set():
            started = time.monotonic()
            try:
                self.tick()
                failures = 0
            except (redis.RedisError, OSError, DatabaseError) as error:
                log.warning(
                    "ingest rests, what it read is read again: %s: %s", type(error).__name__, error
                )
                if isinstance(error, DatabaseError):
                    connection.close()
                self._looked = 0.0
                self.stop.wait(_REST_S[min(failures, len(_REST_S) - 1)])
                failures += 1
                continue
            self.stop.wait(max(0.0, started + TICK_S - time.monotonic()))

    def tick(self) -> int:
        """Reads what is there, commits it, acknowledges it."""
        entries = self._read()
        if entries:
            kept, attempt_of = self._keep(entries)
            self._acknowledge(entries, kept, attempt_of)
            self.ticks += 1
            for item in kept:
                self._judge(item.summaries)
        self._tell_owed()
        return len(entries)

    def _read(self) -> list[Entry]:
        """Entries up to a tick's worth; first those that a dead consumer, or this one before a
        failure, had read.
        """
        redis_client = client()
        if time.monotonic() - self._looked > 1.0:
            self._claim(redis_client)
            self._looked = time.monotonic() if len(self._claimed) < _READ else 0.0
        entries, size = self._claimed, sum(_size(entry) for entry in self._claimed)
        self._claimed = []
        # with something in hand, or progress owed, only look; else wait for the first entry
        block = None if entries or self._owed else _BLOCK_MS
        while size < _TICK_BYTES:
            count = max(1, min(_READ, int((_TICK_BYTES - size) / self._entry_bytes)))
            try:
                answer: Any = redis_client.xreadgroup(
                    names.TELEMETRY_GROUP,
                    self.name,
                    {names.TELEMETRY: ">"},
                    count=count,
                    block=block,
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                self._claim(redis_client)
                continue
            found = [Entry(*pair) for pair in _pairs(answer)]
            entries += found
            size += sum(_size(entry) for entry in found)
            if found:
                self._entry_bytes = 0.5 * self._entry_bytes + 0.5 * _size(found[-1])
            if len(found) < count:
                break
            block = None
        return entries

    def _claim(self, redis_client: redis.Redis) -> None:
        """Takes over what was read and not acknowledged: by consumers long silent, by this one
        before a failure.
        """
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
        self._claimed = [Entry(*pair) for pair in _pairs(own)]
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
            log.info("took over %d entries of consumer %s", len(answer[1]), name)
            self._claimed += [Entry(*pair) for pair in answer[1] if pair[1]]
            break

    def _keep(self, entries: list[Entry]) -> tuple[list[Kept], dict[Writer, str]]:
        """Commits them together; where the data is refused, one by one, so that only the bad entry
        is dropped.
        """
        now = clock.now().timestamp()
        news, attempt_of = self.opener.news(entries, now)
        try:
            return [self._store(news)], attempt_of
        except (DataError, IntegrityError, ValueError, OverflowError):
            kept = []
            for entry in entries:
                try:
                    kept.append(self._store(self.opener.news([entry], now)[0]))
                except (DataError, IntegrityError, ValueError, OverflowError) as error:
                    self.opener.drop(entry, "refused", f"{type(error).__name__}: {error}")
            return kept, attempt_of

    def _store(self, news: Any) -> Kept:
        now = time.monotonic()
        due = {
            run_id for run_id in news.run_ids() if now - self._told.get(run_id, 0.0) >= _PROGRESS_S
        }
        kept = news_store(news, progress_of=due)
        for run_id, summary in kept.summaries.items():
            if run_id in due:
                self._told[run_id] = now
                self._owed.pop(run_id, None)
            else:
                self._owed[run_id] = summary
        return kept

    def _judge(self, summaries: dict[int, dict[str, Any]]) -> None:
        """Holds each attempt against its prediction once, some steps after its first; its end does
        so again.
        """
        for run_id, summary in summaries.items():
            key = (run_id, summary["attempt"])
            due = self._judged.setdefault(key, summary["step"] + EARLY)
            if not due or summary["step"] < due % _AGAIN:
                continue
            first, self._judged[key] = due < _AGAIN, 0
            run = Run.objects.filter(pk=run_id, kind="train").first()
            if run is not None:
                try:
                    if slow_tell(run=run, attempt=key[1]) is None:  # too few steps are logged yet
                        self._judged[key] = _AGAIN + summary["step"] + EARLY
                    if first:
                        misses_tell(run=run, attempt=key[1])
                except (ValueError, KeyError, TypeError):
                    log.exception("run %s could not be held against its prediction", run_id)
        while len(self._judged) > _REMEMBERED:
            del self._judged[next(iter(self._judged))]

    def _tell_owed(self) -> None:
        now = time.monotonic()
        due = {
            run_id: summary
            for run_id, summary in self._owed.items()
            if now - self._told[run_id] >= _PROGRESS_S
        }
        if due:
            progress_tell(due)
            for run_id in due:
                self._told[run_id] = now
                del self._owed[run_id]

    def _acknowledge(
        self, entries: list[Entry], kept: list[Kept], attempt_of: dict[Writer, str]
    ) -> None:
        with client().pipeline(transaction=False) as pipe:
            keys = set()
            for key, field_name, number in _acked(kept, attempt_of):
                pipe.hset(key, field_name, str(number))
                keys.add(key)
            for key in keys:
                pipe.expire(key, names.ACKED_TTL_S)
            ids = [entry.id for entry in entries]
            pipe.xack(names.TELEMETRY, names.TELEMETRY_GROUP, *ids)
            pipe.xdel(names.TELEMETRY, *ids)
            pipe.execute()


def _acked(kept: list[Kept], attempt_of: dict[Writer, str]) -> list[tuple[str, str, int]]:
    """`(key, field, number)` for every writer of the tick, also those with nothing new: they missed
    it before.
    """
    found = []
    for item in kept:
        streams = (
            (names.STREAM_POINTS, item.points),
            (names.STREAM_EVENTS, item.events),
            (names.STREAM_LOGS, item.lines),
        )
        for stream, stored in streams:
            for one in stored:
                key = names.acked_key(attempt_of[one.writer])
                found.append((key, names.acked_field(stream, one.writer.rank), one.complete_to))
    return found


def _pairs(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries `(id, fields)` of a read, in both shapes that redis-py gives; deleted ones have no
    fields.
    """
    if not answer:
        return []
    streams = answer.values() if isinstance(answer, dict) else [part for _, part in answer]
    found: list[tuple[bytes, dict[bytes, bytes]]] = []
    for part in streams:
        entries = part[0] if part and isinstance(part[0], list) else part
        found += [(entry_id, fields) for entry_id, fields in entries if fields]
    return found


def _size(entry: Entry) -> int:
    return len(entry.fields.get(names.FIELD_MESSAGE.encode(), b""))
