"""Boundaries of the ingest loop: backoff, progress, turns of runs."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db import DatabaseError, InterfaceError

from orchestrator.common import stream_groups
from orchestrator.telemetry import ingest as loop
from orchestrator.telemetry.backlog import Backlog
from orchestrator.telemetry.ingest import Ingest
from orchestrator.telemetry.services import StoreResult
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.decoding import Entry
from orchestrator.telemetry.writing.events import StoredEvents
from orchestrator.telemetry.writing.lines import StoredLines
from workers.contracts.wire import names


class Time:
    """A monotonic clock that the test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


def entry(number: int, size: int = 10) -> tuple[bytes, dict[bytes, bytes]]:
    return (f"{number}-0".encode(), {names.FIELD_MESSAGE.encode(): b"x" * size})


def ids(entries: list[Entry]) -> list[int]:
    return [int(item.id.split(b"-")[0]) for item in entries]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time(100.0)
    monkeypatch.setattr(loop, "time", fake)
    return fake


def test_the_constants() -> None:
    assert (loop.TICK_S, loop._CLAIM, loop._TICK_BYTES) == (0.1, 64, 2_000_000)
    assert (stream_groups.DEAD_S, loop._PROGRESS_S) == (3.0, 1.0)
    assert loop._BACKOFF_S == (0.1, 0.5, 1.0, 2.0)
    ingest = Ingest()
    assert (ingest.ticks, ingest._claimed_at, ingest._left_from) == (0, 0.0, {})


class Incoming:
    def __init__(self, *runs: int) -> None:
        self.runs = set(runs)

    def run_ids(self) -> set[int]:
        return self.runs


def test_progress_is_published_at_most_once_a_second(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[set[int]] = []
    published: list[dict[int, Any]] = []

    def store(incoming: Any, *, publish_progress: set[int]) -> StoreResult:
        stored.append(publish_progress)
        return StoreResult([], [], [], {run: {"step": len(stored)} for run in incoming.runs})

    monkeypatch.setattr(loop, "incoming_store", store)
    monkeypatch.setattr(loop, "progress_publish", lambda due: published.append(dict(due)))
    ingest = Ingest()
    ingest._store(Incoming(1, 2))  # type: ignore[arg-type]
    assert (stored[-1], ingest._deferred) == ({1, 2}, {})
    time.now = 100.75
    ingest._store(Incoming(1))  # type: ignore[arg-type]
    assert (stored[-1], ingest._deferred) == (set(), {1: {"step": 2}})
    ingest._publish_deferred()
    assert published == []
    time.now = 101.0
    ingest._store(Incoming(2))  # type: ignore[arg-type]
    assert stored[-1] == {2}
    ingest._publish_deferred()
    assert (published, ingest._deferred) == ([{1: {"step": 2}}], {})
    assert ingest._published == {1: 101.0, 2: 101.0}
    time.now = 101.5
    ingest._store(Incoming(1))  # type: ignore[arg-type]
    time.now = 102.0
    ingest._store(Incoming(1))  # type: ignore[arg-type]
    assert (stored[-1], ingest._deferred) == ({1}, {})  # newer progress replaces the deferred one


class Stop:
    """An event that records how long the loop waits, and is set after some waits."""

    def __init__(self, waits: int) -> None:
        self.left, self.waits = waits, []  # type: ignore[var-annotated]

    def is_set(self) -> bool:
        return self.left == 0

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.left -= 1


def test_the_loop_backs_off_longer_with_each_failure(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(loop.connection, "close", lambda: closed.append(True))
    errors: list[Any] = [redis.ConnectionError(), OSError(), DatabaseError(), None]
    errors += [InterfaceError(), *[DatabaseError()] * 5]

    def tick(self: Ingest) -> int:
        self._claimed_at = 50.0
        error = errors.pop(0)
        if error is not None:
            raise error
        time.now += 0.0625
        return 0

    monkeypatch.setattr(Ingest, "tick", tick)
    stop = Stop(4)
    ingest = Ingest(stop=stop)  # type: ignore[arg-type]
    ingest.run()
    assert stop.waits == [0.1, 0.5, 1.0, pytest.approx(0.0375)]
    assert (len(closed), ingest._claimed_at) == (1, 50.0)
    stop.left = 6
    ingest.run()
    assert stop.waits[4:] == [0.1, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert (len(closed), ingest._claimed_at) == (7, 0.0)


def test_the_loop_does_not_wait_after_a_tick_that_took_longer(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tick(self: Ingest) -> int:
        time.now += 0.5
        return 0

    monkeypatch.setattr(Ingest, "tick", tick)
    stop = Stop(2)
    Ingest(stop=stop).run()  # type: ignore[arg-type]
    assert stop.waits == [0.0, 0.0]


def test_every_writer_is_acknowledged_with_its_stream_and_rank() -> None:
    one, two = Writer(1, 1, 0), Writer(1, 1, 3)
    result = StoreResult([], [StoredEvents(one, 0, 1, 5)], [StoredLines(two, [], 0, 7)], {})
    assert (
        loop._writer_acks([result, result], {one: "11", two: "12"})
        == [
            ("orrery:acked:11", "events/0", 5),
            ("orrery:acked:12", "logs/3", 7),
        ]
        * 2
    )


def test_a_tick_with_entries_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [[Entry(*entry(1)), Entry(*entry(2))], []]
    acknowledged: list[Any] = []
    monkeypatch.setattr(Ingest, "_read", lambda self: entries.pop(0))
    monkeypatch.setattr(Ingest, "_commit", lambda self, new: (new, [], {}))
    monkeypatch.setattr(Ingest, "_acknowledge", lambda self, *args: acknowledged.append(args))
    cleaned: list[Any] = []
    monkeypatch.setattr(loop, "client", lambda: None)
    monkeypatch.setattr(loop, "summaries_refresh", lambda: False)
    monkeypatch.setattr(loop.streams, "clean", lambda *args: cleaned.append(args))
    ingest = Ingest()
    assert (ingest.tick(), ingest.ticks) == (2, 1)
    assert (ingest.tick(), ingest.ticks, len(acknowledged)) == (0, 1, 1)
    assert len(cleaned) == 1, "not with each tick"


def run_entry(number: int, run: str, size: int) -> Entry:
    fields = {names.FIELD_MESSAGE.encode(): b"x" * size, names.FIELD_RUN.encode(): run.encode()}
    return Entry(f"{number}-0".encode(), fields)


def test_a_backlog_gives_each_run_its_turn_and_keeps_the_order_within_a_run() -> None:
    stored = {number: run_entry(number, "1", 60_000) for number in range(1, 301)}  # 18 MB
    stored |= {number: run_entry(number, f"{number}", 100) for number in range(301, 304)}
    requested: list[bytes] = []

    def fetch(keys: list[tuple[str, bytes]]) -> list[Entry]:
        requested.extend(id for _, id in keys)
        return [stored[int(id.split(b"-")[0])] for _, id in keys if id != b"200-0"]

    backlog = Backlog()
    backlog.add(stored.values())
    backlog.add([stored[7]])  # read twice
    assert len(backlog) == 303
    first = backlog.take(2_000_000, fetch)
    assert ids(first)[:5] == [1, 2, 301, 302, 303]  # 64 KiB of the first run, then the others
    assert 30 < len(first) < 40 and requested == []
    backlog.add(first[3:], first=True)  # the tick failed
    order = ids(first[:3])
    while backlog:
        order += ids(backlog.take(2_000_000, fetch))
    of_run = [number for number in order if number <= 300]
    assert of_run == [number for number in range(1, 301) if number != 200]  # no longer stored
    assert sorted(order) == [number for number in range(1, 304) if number != 200]
    assert len(requested) > 100, "only 8 MB are held in memory"
    assert (backlog.waiting_bytes, backlog._cached) == (0, 0)
