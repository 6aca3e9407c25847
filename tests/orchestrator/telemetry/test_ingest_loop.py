"""Boundaries of the ingest loop, on a scripted Redis client: reads, claims, backoff, progress."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db import DatabaseError
from redis.exceptions import ResponseError

from orchestrator.telemetry import ingest as loop
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


class Client:
    """Answers reads from lists and records every call."""

    def __init__(self) -> None:
        self.new: list[Any] = []
        self.own: list[Any] = []
        self.consumers: list[dict[str, Any]] = []
        self.taken: list[Any] = []
        self.exists: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []

    def xgroup_create(self, stream: str, group: str, *, id: str, mkstream: bool) -> None:
        self.calls.append(("create", stream, group, id, mkstream))
        if self.exists:
            raise self.exists

    def xreadgroup(
        self, group: str, name: str, streams: dict[str, str], *, count: int, block: Any = None
    ) -> Any:
        start = streams[names.TELEMETRY]
        self.calls.append(("read", start, count, block))
        if start == "0":
            return [[names.TELEMETRY, self.own]]
        answer = self.new.pop(0) if self.new else []
        if isinstance(answer, Exception):
            raise answer
        return [[names.TELEMETRY, answer]]

    def xinfo_consumers(self, stream: str, group: str) -> Any:
        return self.consumers

    def xgroup_delconsumer(self, stream: str, group: str, name: str) -> None:
        self.calls.append(("delete", name))

    def xautoclaim(
        self, stream: str, group: str, name: str, *, min_idle_time: int, count: int
    ) -> Any:
        self.calls.append(("claim", name, min_idle_time, count))
        return [b"0-0", self.taken, []]

    def reads(self) -> list[tuple[int, Any]]:
        """`(count, block)` of each read of new entries."""
        return [call[2:] for call in self.calls if call[:2] == ("read", ">")]


def entry(number: int, size: int = 10) -> tuple[bytes, dict[bytes, bytes]]:
    return (f"{number}-0".encode(), {names.FIELD_MESSAGE.encode(): b"x" * size})


def ids(entries: list[Entry]) -> list[int]:
    return [int(item.id.split(b"-")[0]) for item in entries]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Client:
    fake = Client()
    monkeypatch.setattr(loop, "client", lambda: fake)
    return fake


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time(100.0)
    monkeypatch.setattr(loop, "time", fake)
    return fake


def test_the_constants() -> None:
    assert (loop.TICK_S, loop._READ, loop._TICK_BYTES) == (0.1, 64, 2_000_000)
    assert (loop._BLOCK_MS, loop._DEAD_MS, loop._PROGRESS_S) == (1000, 3000, 1.0)
    assert loop._BACKOFF_S == (0.1, 0.5, 1.0, 2.0)
    ingest = Ingest()
    assert (ingest.ticks, ingest._claimed_at, ingest._entry_bytes) == (0, 0.0, 500_000.0)


def test_a_read_requests_for_as_many_entries_as_a_tick_holds(fake: Client, time: Time) -> None:
    ingest = Ingest(name="me", _claimed_at=100.0)
    fake.new = [[entry(i, 1_000) for i in range(1, 5)]]
    assert ids(ingest._read()) == [1, 2, 3, 4]
    assert fake.reads() == [(4, 1000), (7, None)]  # 2 MB of entries of 500 kB; then of 250.5 kB
    assert ingest._entry_bytes == 250_500.0
    small = Ingest(_claimed_at=100.0, _entry_bytes=100.0)
    small._read()
    assert fake.reads()[-1] == (64, 1000)
    large = Ingest(_claimed_at=100.0, _entry_bytes=3e6)
    fake.new = [[entry(1, 1_999_999)], [entry(2, 1)], [entry(3, 1)]]
    fake.calls.clear()
    assert ids(large._read()) == [1, 2]  # the second fills the tick exactly
    assert fake.reads() == [(1, 1000), (1, None)]


def test_a_read_stops_when_fewer_entries_arrive_than_it_requested_for(
    fake: Client, time: Time
) -> None:
    ingest = Ingest(_claimed_at=100.0)
    fake.new = [[entry(1), entry(2), entry(3)], [entry(4)]]
    assert ids(ingest._read()) == [1, 2, 3] and fake.reads() == [(4, 1000)]


def test_a_read_waits_only_if_there_is_nothing_else_to_do(fake: Client, time: Time) -> None:
    Ingest(_claimed_at=100.0)._read()
    Ingest(_claimed_at=100.0, _deferred={1: {}})._read()
    claimed = Ingest(_claimed_at=100.0, _claimed=[Entry(*entry(1))])
    assert ids(claimed._read()) == [1] and claimed._claimed == []
    assert [block for _, block in fake.reads()] == [1000, None, None]
    full = Ingest(_claimed_at=100.0, _claimed=[Entry(*entry(1, 2_000_000))])
    fake.calls.clear()
    assert ids(full._read()) == [1] and fake.reads() == []
    # claimed entries count: one more of 500 kB fits
    most = Ingest(_claimed_at=100.0, _claimed=[Entry(*entry(1, 1_400_000))])
    assert ids(most._read()) == [1] and fake.reads() == [(1, None)]


@pytest.mark.parametrize(("claimed_at", "claims"), [(99.0, 0), (98.9, 1), (0.0, 1)])
def test_entries_are_claimed_once_a_second(
    fake: Client, time: Time, claimed_at: float, claims: int
) -> None:
    ingest = Ingest(_claimed_at=claimed_at)
    ingest._read()
    assert sum(call[0] == "create" for call in fake.calls) == claims
    assert ingest._claimed_at == (100.0 if claims else claimed_at)


@pytest.mark.parametrize(("pending", "claimed_at"), [(63, 100.0), (64, 0.0)])
def test_a_full_claim_is_repeated_at_once(
    fake: Client, time: Time, pending: int, claimed_at: float
) -> None:
    fake.own = [entry(i) for i in range(pending)]
    ingest = Ingest()
    assert len(ingest._read()) == pending and ingest._claimed_at == claimed_at


def test_a_claim_takes_entries_of_one_dead_consumer(fake: Client, time: Time) -> None:
    fake.consumers = [
        {"name": b"me", "idle": 9000, "pending": 1},
        {"name": b"alive", "idle": 2999, "pending": 2},
        {"name": b"done", "idle": 3000, "pending": 0},
        {"name": b"dead", "idle": 3000, "pending": 1},
        {"name": b"dead too", "idle": 9999, "pending": 1},
    ]
    fake.own, fake.taken = [entry(1)], [entry(2), (b"3-0", None)]
    ingest = Ingest(name="me")
    ingest._claim(fake)  # type: ignore[arg-type]
    assert ids(ingest._claimed) == [1, 2]
    assert fake.calls == [
        ("create", names.TELEMETRY, names.TELEMETRY_GROUP, "0", True),
        ("read", "0", 64, None),
        ("delete", "done"),
        ("claim", "me", 3000, 64),
    ]


def test_a_missing_group_is_created_and_other_errors_are_raised(fake: Client, time: Time) -> None:
    fake.exists = ResponseError("BUSYGROUP Consumer Group name already exists")
    fake.new = [ResponseError("NOGROUP No such key"), [entry(1)]]
    ingest = Ingest(_claimed_at=100.0)
    assert ids(ingest._read()) == [1]
    assert [call[0] for call in fake.calls] == ["read", "create", "read", "read"]
    fake.new = [ResponseError("WRONGTYPE")]
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        Ingest(_claimed_at=100.0)._read()
    fake.exists = ResponseError("WRONGTYPE")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        Ingest()._claim(fake)  # type: ignore[arg-type]


def test_reads_have_two_forms_and_deleted_entries_no_fields() -> None:
    pairs = [entry(1), (b"2-0", {}), (b"3-0", None), entry(4)]
    for answer in ([[b"s", pairs]], {b"s": pairs}, {b"s": [pairs]}):
        assert ids(loop._parse_entries(answer)) == [1, 4]
    assert [loop._parse_entries(answer) for answer in (None, [], {}, {b"s": []})] == [[]] * 4
    assert loop._size(Entry(b"1-0", {})) == 0


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
    errors += [DatabaseError()] * 6

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
    monkeypatch.setattr(Ingest, "_commit", lambda self, new: ([], {}))
    monkeypatch.setattr(Ingest, "_acknowledge", lambda self, *args: acknowledged.append(args))
    ingest = Ingest()
    assert (ingest.tick(), ingest.ticks) == (2, 1)
    assert (ingest.tick(), ingest.ticks, len(acknowledged)) == (0, 1, 1)
