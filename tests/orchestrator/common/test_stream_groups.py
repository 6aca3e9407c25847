"""Many streams read as one group: fair turns, bounds, acknowledgement, readers that ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from orchestrator.common import stream_groups, streams
from orchestrator.common.stream_groups import GroupReader, StreamEntry

NAMES = [f"test:{number}" for number in range(1000)]


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


def write(broker: redis.Redis, stream: str, count: int, size: int = 10) -> None:
    with broker.pipeline(transaction=False) as pipe:
        for _ in range(count):
            pipe.xadd(stream, {"m": b"x" * size})
        pipe.execute()


def number_by_stream(entries: list[StreamEntry]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for entry in entries:
        numbers[entry.stream] = numbers.get(entry.stream, 0) + 1
    return numbers


def test_one_call_reads_all_streams_and_creates_their_groups(broker: redis.Redis) -> None:
    reader = GroupReader("g", "me")
    assert reader.read(broker, NAMES, count=9, limit_bytes=10**6).entries == []
    assert broker.keys("test:*") == [], "empty streams are not created"
    for name in NAMES[::100]:
        write(broker, name, 3)
    broker.set(NAMES[1], "a node with shared credentials wrote another type")
    broker.config_resetstat()
    reading = reader.read(broker, NAMES, count=9, limit_bytes=10**6)
    assert number_by_stream(reading.entries) == dict.fromkeys(NAMES[::100], 3)
    assert reading.cut == [] and reading.entries[0].fields == {b"m": b"x" * 10}
    assert broker.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    reader.acknowledge(broker, reading.entries)
    assert [broker.xlen(name) for name in NAMES[::100]] == [0] * 10
    assert stream_groups.waiting(broker, "g", NAMES)["waiting"] == 0


def test_a_flooding_stream_does_not_delay_the_others(broker: redis.Redis) -> None:
    write(broker, NAMES[0], 500, 100_000)
    for name in NAMES[1:5]:
        write(broker, name, 2, 1000)
    reader = GroupReader("g", "me")
    first = reader.read(broker, NAMES, count=500, limit_bytes=1_000_000)
    numbers = number_by_stream(first.entries)
    assert all(numbers[name] == 2 for name in NAMES[1:5])
    assert numbers[NAMES[0]] == 10, "it takes what is left of the limit, after the others' turns"
    assert first.entries[2].stream == NAMES[1] and first.cut == [NAMES[0]]


def test_streams_that_got_nothing_are_first_in_the_next_turn(broker: redis.Redis) -> None:
    for name in NAMES[:4]:
        write(broker, name, 3, 150_000)
    reader, seen = GroupReader("g", "me"), []
    for _ in range(3):
        reading = reader.read(broker, NAMES[:4], count=9, limit_bytes=300_000)
        seen += [*number_by_stream(reading.entries)]
    assert set(seen[:4]) == set(NAMES[:4])


def test_what_a_reader_was_given_can_be_read_again(broker: redis.Redis) -> None:
    for name in NAMES[:2]:
        write(broker, name, 5)
    reader = GroupReader("g", "me")
    given = reader.read(broker, NAMES[:2], count=9, limit_bytes=10**6).entries
    broker.xdel(NAMES[0], given[0].id)
    positions, again = dict.fromkeys(NAMES[:2], "0"), []
    while positions:
        reading = reader.read_pending(broker, positions, count=2, limit_bytes=10**6)
        again += reading.entries
        last = {entry.stream: entry.id.decode() for entry in reading.entries}
        positions = {name: last.get(name, positions[name]) for name in reading.cut}
    assert sorted(again) == sorted(given[1:]), "deleted entries are acknowledged"
    assert broker.xpending(NAMES[0], "g")["pending"] == 4


def test_entries_of_ended_readers_are_claimed(broker: redis.Redis) -> None:
    write(broker, NAMES[0], 5)
    ended, living = GroupReader("g", "ended"), GroupReader("g", "living")
    given = ended.read(broker, NAMES, count=9, limit_bytes=10**6).entries
    assert living.claim(broker, NAMES, count=9, limit_bytes=10**6) == ([], False), "it lives"
    first, more = living.claim(broker, NAMES, count=3, limit_bytes=10**6, dead_s=0.0)
    rest, end = living.claim(broker, NAMES, count=9, limit_bytes=10**6, dead_s=0.0)
    assert (more, end) == (True, False) and first + rest == given
    broker.hset(stream_groups.READERS, "g very old", "1.0")
    living.claim(broker, NAMES, count=9, limit_bytes=10**6)
    assert not broker.hexists(stream_groups.READERS, "g very old")


def test_what_waits_is_measured_over_all_streams(broker: redis.Redis) -> None:
    assert stream_groups.waiting(broker, "g", NAMES) == {
        "waiting": 0,
        "lag_s": 0.0,
        "idle_s": None,
    }
    broker.xadd(NAMES[3], {"m": "x"}, id=f"{int(time.time() * 1000) - 60_000}-1")
    write(broker, NAMES[900], 2)
    GroupReader("g", "me").read(broker, NAMES, count=1, limit_bytes=10**6)
    measured = stream_groups.waiting(broker, "g", NAMES)
    assert measured["waiting"] == 3 and measured["lag_s"] >= 59.0
    assert 0.0 <= measured["idle_s"] < 60.0
    assert stream_groups.waiting(broker, "other", NAMES)["idle_s"] is None


def test_a_stream_whose_ids_are_used_up_works_again(broker: redis.Redis) -> None:
    reader, name = GroupReader("g", "me"), NAMES[0]
    last = 2**64 - 1
    broker.xadd(name, {"m": "x"}, id=f"{last}-{last}")
    with pytest.raises(redis.ResponseError):
        broker.xadd(name, {"m": "lost"})
    streams.clean(broker, NAMES[:2])
    assert broker.exists(name), "not while an entry waits"
    reader.acknowledge(broker, reader.read(broker, NAMES, count=9, limit_bytes=10**6).entries)
    streams.clean(broker, NAMES[:2])
    broker.xadd(name, {"m": "y"})
    assert len(reader.read(broker, NAMES, count=9, limit_bytes=10**6).entries) == 1
