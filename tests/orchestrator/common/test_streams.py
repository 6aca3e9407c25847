"""Streams are trimmed to what their readers have not acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from orchestrator.common import streams

STREAM = "test:stream"


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


def write(broker: redis.Redis, count: int) -> list[bytes]:
    return [broker.xadd(STREAM, {"m": number}) for number in range(count)]  # type: ignore[misc]


def read(broker: redis.Redis, group: str, count: int) -> list[bytes]:
    answer: Any = broker.xreadgroup(group, "me", {STREAM: ">"}, count=count)
    [(_, entries)] = answer.items() if isinstance(answer, dict) else answer
    entries = entries[0] if isinstance(entries[0], list) else entries
    return [id for id, _ in entries]


def left(broker: redis.Redis) -> list[bytes]:
    entries: Any = broker.xrange(STREAM)
    return [id for id, _ in entries]


def test_a_stream_without_readers_keeps_everything(broker: redis.Redis) -> None:
    assert streams.trim(broker, STREAM) == 0
    ids = write(broker, 3)
    assert streams.trim(broker, STREAM) == 0 and left(broker) == ids


def test_only_what_is_acknowledged_is_deleted(broker: redis.Redis) -> None:
    broker.xgroup_create(STREAM, "g", id="0", mkstream=True)
    ids = write(broker, 6)
    assert streams.trim(broker, STREAM) == 0 and left(broker) == ids, "nothing was read"
    assert read(broker, "g", 4) == ids[:4]
    broker.xack(STREAM, "g", ids[0], ids[2])
    assert streams.trim(broker, STREAM) == 1
    assert left(broker) == ids[1:], "the second is pending"
    broker.xack(STREAM, "g", ids[1], ids[3])
    assert streams.trim(broker, STREAM) == 3
    assert left(broker) == ids[4:], "the rest was not read"
    assert read(broker, "g", 9) == ids[4:]
    broker.xack(STREAM, "g", *ids[4:])
    assert streams.trim(broker, STREAM) == 2 and left(broker) == []
    more = write(broker, 1)
    assert streams.trim(broker, STREAM) == 0 and left(broker) == more


def test_the_slowest_group_counts(broker: redis.Redis) -> None:
    broker.xgroup_create(STREAM, "fast", id="0", mkstream=True)
    broker.xgroup_create(STREAM, "slow", id="0")
    ids = write(broker, 2)
    broker.xack(STREAM, "fast", *read(broker, "fast", 2))
    assert streams.trim(broker, STREAM) == 0
    broker.xack(STREAM, "slow", *read(broker, "slow", 1))
    assert streams.trim(broker, STREAM) == 1 and left(broker) == ids[1:]
