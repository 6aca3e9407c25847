"""Live frames: numbered without gaps, committed with the data, published after it, replayed."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
import redis
from django.db import connection, transaction

from orchestrator.common import clock, live
from workers.contracts.wire.names import live_channel


@pytest.mark.django_db
def test_frames_are_numbered_and_replayed_as_text() -> None:
    assert live.append("run:1", "event", {"event": {"type": "hang", "data": {}}}) == 1
    assert live.append("run:1", "points", '{"values":{"loss":[[1,2.5]]}}') == 2
    assert live.append("fleet", "queue", {}) == 0  # numbered after the commit
    epoch = live.head("run:1").epoch
    assert [json.loads(text) for _, text in live.frames_after("run:1", 0)] == [
        {"epoch": epoch, "seq": 1, "type": "event", "event": {"type": "hang", "data": {}}},
        {"epoch": epoch, "seq": 2, "type": "points", "values": {"loss": [[1, 2.5]]}},
    ]
    assert [seq for seq, _ in live.frames_after("run:1", 1)] == [2]
    frame = {"epoch": live.head("fleet").epoch, "seq": 1, "type": "queue"}
    assert json.loads(live.frames_after("fleet", 0)[0][1]) == frame
    assert live.head("run:2") == ("", 0, 0)


@pytest.mark.django_db
def test_non_finite_numbers_are_strings() -> None:
    live.append("run:1", "points", {"values": {"loss": [[1, float("nan")], [2, float("-inf")]]}})
    frame = json.loads(live.frames_after("run:1", 0)[0][1])
    assert frame["values"] == {"loss": [[1, "NaN"], [2, "-Infinity"]]}


@pytest.mark.django_db
def test_several_topics_at_once() -> None:
    new = [
        live.NewFrame("run:1", "log", {}),
        live.NewFrame("fleet", "queue", {}),
        live.NewFrame("run:1", "log", {}),
    ]
    assert live.append_many(new) == [1, 0, 2]
    assert live.append_many(new) == [3, 0, 4]
    assert live.head("fleet").seq == 2
    assert live.heads(["run:1", "fleet", "run:9"]).keys() == {"run:1", "fleet"}


@pytest.mark.django_db(transaction=True)
def test_published_after_commit_only_and_a_rollback_leaves_no_hole(live_redis: str) -> None:
    with redis.Redis.from_url(live_redis) as listener, listener.pubsub() as heard:
        heard.subscribe(live_channel("run:1"))
        heard.get_message(timeout=60)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            live.append("run:1", "event", {"lost": True})
            raise ZeroDivisionError
        with transaction.atomic():
            live.append("run:1", "event", {"kept": True})
            assert heard.get_message(timeout=0.05) is None
        message = heard.get_message(timeout=60)
    assert message is not None
    assert [(1, message["data"].decode())] == live.frames_after("run:1", 0)


@pytest.mark.django_db(transaction=True)
def test_without_redis_nothing_fails(settings: object) -> None:
    settings.REDIS_URL = "unix:///nowhere/valkey.sock"  # type: ignore[attr-defined]
    assert [live.append("run:1", "event", {}) for _ in range(3)] == [1, 2, 3]


@pytest.mark.django_db(transaction=True)
def test_concurrent_writers_leave_no_gap_and_no_duplicate() -> None:
    seen: list[int] = []

    def write() -> None:
        try:
            for _ in range(25):
                with transaction.atomic():
                    number = live.append("run:1", "event", {})
                    # frames become visible in order: a writer with number n sees all below it
                    below = len(live.frames_after("run:1", 0)) - 1
                seen.append(number - 1 - below)
        finally:
            connection.close()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0] * 100
    assert [seq for seq, _ in live.frames_after("run:1", 0)] == list(range(1, 101))


@pytest.mark.django_db
def test_old_frames_go_and_numbers_stay() -> None:
    live.append("run:1", "event", {})
    assert live.prune(before=clock.now() - timedelta(hours=1)) == 0
    assert live.prune(before=clock.now() + timedelta(seconds=1)) == 1
    assert live.append("run:1", "event", {}) == 2
    assert live.head("run:1").oldest == 2


@pytest.mark.django_db(transaction=True)
def test_transactions_that_write_to_the_fleet_wait_for_no_other(live_redis: str) -> None:
    """Each of them is open until all have written; the frames get numbers without gaps."""
    together, errors = threading.Barrier(4, timeout=60), []

    def write(number: int) -> None:
        try:
            with transaction.atomic():
                live.append("fleet", "event", {"number": number})
                if connection.vendor == "postgresql":  # SQLite has one writer
                    together.wait()
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    with redis.Redis.from_url(live_redis) as listener, listener.pubsub() as heard:
        heard.subscribe(live_channel("fleet"))
        assert heard.get_message(timeout=60)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert errors == []
        seqs = []
        while len(seqs) < 4:
            message = heard.get_message(timeout=60)
            assert message is not None, seqs
            seqs.append(json.loads(message["data"])["seq"])
    assert sorted(seqs) == [1, 2, 3, 4]
    assert [seq for seq, _ in live.frames_after("fleet", 0)] == [1, 2, 3, 4]


@pytest.mark.django_db(transaction=True)
def test_frames_of_a_process_that_ended_before_it_numbered_them(
    live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(live, "number_waiting", lambda topic: 0)
        live.append("fleet", "queue", {})
        assert live.frames_after("fleet", 0) == []
    assert live.number_waiting("fleet") == 1 and live.number_waiting("fleet") == 0
    assert [seq for seq, _ in live.frames_after("fleet", 0)] == [1]
