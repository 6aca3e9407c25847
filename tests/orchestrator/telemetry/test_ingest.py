"""The ingest loop on a real Redis stores verified entries once, despite crashes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import OperationalError

from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import live, stream_groups
from orchestrator.common import redis as common_redis
from orchestrator.dead_letters import failure_counts, retry_stamp
from orchestrator.dead_letters import services as dead_letters
from orchestrator.dead_letters.models import DeadLetter
from orchestrator.fleet.models import Node
from orchestrator.fleet.selectors import node_secret
from orchestrator.runs.models import Attempt, Checkpoint, RunEvent
from orchestrator.telemetry import ingest as loop
from orchestrator.telemetry import selectors
from orchestrator.telemetry.ingest import Ingest
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of
from tests.redis_server import RedisServer
from workers.contracts.wire import names as wire
from workers.contracts.wire.envelope import seal
from workers.contracts.wire.points import MAX_EVENT_BYTES

pytestmark = pytest.mark.django_db


class Supervisor:
    """Sends data of one attempt's ranks, as a node's supervisor does."""

    def __init__(self, on: Node, attempt: Attempt) -> None:
        self.on, self.attempt, self.run = on, attempt, attempt.run

    def body(self, *parts: dict[str, Any]) -> dict[str, Any]:
        return {
            "run": str(self.run.pk),
            "attempt": self.attempt.number,
            "attempt_id": str(self.attempt.pk),
            "fence": str(self.attempt.fence),
            "batches": list(parts),
        }

    def send(
        self, *parts: dict[str, Any], secret: bytes = b"", node: str = "", **changes: Any
    ) -> None:
        sealed = seal(
            secret or node_secret(self.on),
            wire.KIND_TELEMETRY,
            {**self.body(*parts), **changes},
            ttl_s=60,
            now=time.time(),
            node=self.on.name,
        )
        self.put(
            {
                wire.FIELD_NODE: node or self.on.name,
                wire.FIELD_RUN: str(self.run.pk),
                wire.FIELD_MESSAGE: sealed,
            }
        )

    def put(self, fields: dict[Any, Any]) -> None:
        common_redis.client().xadd(wire.TELEMETRY, fields)

    def points(self, seqs: range, **more: Any) -> dict[str, Any]:
        batch = batch_of(self.run, seqs, attempt=self.attempt.number, **more)
        return {"stream": "points", "rank": batch.rank, "batch": batch.to_dict()}

    def event(self, seq: int, type: str, **data: Any) -> dict[str, Any]:
        common = {
            "run": str(self.run.pk),
            "attempt": self.attempt.number,
            "rank": 0,
            "seq": seq,
            "time": 1000.0,
        }
        return {"stream": "events", "rank": 0, "events": [{**common, "type": type, "data": data}]}

    def acked(self) -> dict[str, int]:
        acks: Any = common_redis.client().hgetall(wire.acked_key(self.attempt.pk))
        return {name.decode(): int(number) for name, number in acks.items()}

    def steps(self) -> list[int]:
        return [row[3] for row in selectors.series_raw(run=self.run, name="loss", rank=0)]


@pytest.fixture
def supervisor(owner: User, live_redis: str) -> Supervisor:
    on = factories.node(devices=2)
    return Supervisor(on, factories.running(factories.run(owner, devices=2), on))


def test_points_events_and_logs_are_stored_and_acknowledged(
    supervisor: Supervisor,
) -> None:
    saved = supervisor.event(
        1, "checkpoint_saved", step=2, path="checkpoints/step-2", bytes=10, tokens=200
    )
    logs = {
        "stream": "logs",
        "rank": -1,
        "first_seq": 1,
        "time": 1000.0,
        "lines": ["started", "loss is 2.5"],
    }
    supervisor.send(supervisor.points(range(1, 4)), supervisor.points(range(1, 4), rank=1), saved)
    supervisor.send(logs)
    assert Ingest().tick() == 2
    assert supervisor.steps() == [1, 2, 3]
    assert supervisor.acked() == {"points/0": 3, "points/1": 3, "events/0": 1, "logs/-1": 2}
    assert common_redis.client().ttl(wire.acked_key(supervisor.attempt.pk)) > 0
    assert Checkpoint.objects.get(run=supervisor.run).step == 2
    assert [line.text for line in selectors.logs(run=supervisor.run, q="2.5")] == ["loss is 2.5"]
    types = [
        json.loads(text)["type"] for _, text in live.frames_after(f"run:{supervisor.run.pk}", 0)
    ]
    assert sorted({"points", "event", "log"} & set(types)) == ["event", "log", "points"]
    assert types.count("points") == 1  # from the lowest rank
    assert common_redis.client().xlen(wire.TELEMETRY) == 0


def test_repeats_are_dropped_and_gaps_are_not_acknowledged(supervisor: Supervisor) -> None:
    ingest = Ingest()
    event = supervisor.event(1, "straggler", rank=1)
    supervisor.send(supervisor.points(range(1, 11)), event)
    supervisor.send(supervisor.points(range(21, 31)), event)
    ingest.tick()
    assert supervisor.acked()["points/0"] == 10
    supervisor.send(supervisor.points(range(8, 26)), event)
    ingest.tick()
    assert supervisor.acked()["points/0"] == 30
    assert sorted(supervisor.steps()) == list(range(1, 31))
    assert RunEvent.objects.filter(run=supervisor.run, type="straggler").count() == 1


def test_unauthorized_entries_are_dropped_and_others_stored(
    supervisor: Supervisor, owner: User
) -> None:
    other = factories.node(devices=1)
    foreign = Supervisor(other, factories.running(factories.run(owner), other))
    points = supervisor.points(range(1, 3))
    supervisor.put({"x": b"y"})
    supervisor.put({wire.FIELD_NODE: supervisor.on.name, wire.FIELD_MESSAGE: b"\xff\xfe"})
    supervisor.send(points, node="unknown")
    supervisor.send(points, secret=b"guessed" * 5)
    # sealed with its own secret, for another node's attempt
    supervisor.send(points, secret=node_secret(other), node=other.name)
    supervisor.send(points, fence="0" * 8)
    supervisor.send(points, attempt_id="999999")
    supervisor.send({**points, "rank": 1})
    supervisor.send({"stream": "points", "rank": 0, "batch": {**points["batch"], "step": [1]}})
    supervisor.send({"stream": "unknown"})
    foreign.send(foreign.points(range(1, 6)))
    ingest = Ingest()
    assert ingest.tick() == 11
    assert ingest.decoder.dropped.total() == 10
    assert (supervisor.steps(), foreign.steps()) == ([], [1, 2, 3, 4, 5])
    assert common_redis.client().xpending(wire.TELEMETRY, wire.TELEMETRY_GROUP)["pending"] == 0


def test_an_entry_that_the_database_refuses_is_dropped_alone(
    supervisor: Supervisor,
) -> None:
    supervisor.send(supervisor.points(range(1, 3)))
    broken = supervisor.event(1, "hang")
    broken["events"][0]["time"] = 1e30  # beyond the last year
    supervisor.send(supervisor.points(range(3, 5)), broken)
    supervisor.send(supervisor.points(range(5, 7)))
    ingest = Ingest()
    ingest.tick()
    assert ingest.decoder.dropped == {"malformed": 1}
    assert supervisor.steps() == [1, 2, 5, 6]
    letter = DeadLetter.objects.get()
    assert (letter.source, letter.node, letter.code) == (
        "telemetry",
        supervisor.on.name,
        "malformed",
    )


def test_a_failed_commit_is_read_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OperationalError("database is locked")

    supervisor.send(supervisor.points(range(1, 6)))
    ingest = Ingest()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "incoming_store", refuse)
        with pytest.raises(OperationalError):
            ingest.tick()
    assert (supervisor.steps(), supervisor.acked()) == ([], {})
    ingest._claimed_at = 0.0  # as `run` does after a failure
    ingest.tick()
    assert (supervisor.steps(), supervisor.acked()) == ([1, 2, 3, 4, 5], {"points/0": 5})


def test_a_dead_consumers_entries_are_claimed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_groups, "DEAD_S", 0.05)
    supervisor.send(supervisor.points(range(1, 6)))
    dead = Ingest(name="dead")
    assert len(dead._read()) == 1  # read, then killed before its commit
    supervisor.send(supervisor.points(range(6, 9)))
    living = Ingest(name="living")
    time.sleep(0.1)
    living.tick()
    assert sorted(supervisor.steps()) == list(range(1, 9))
    assert common_redis.client().xlen(wire.TELEMETRY) == 0


def test_a_flooding_run_does_not_delay_the_points_of_another(supervisor: Supervisor) -> None:
    on = supervisor.on
    quiet = Supervisor(on, factories.running(factories.run(supervisor.run.owner, devices=1), on))
    text = "x" * 8_000
    for first in range(1, 4_001, 200):  # 32 MB
        lines = {"stream": "logs", "rank": 0, "first_seq": first, "time": 1e9}
        supervisor.send({**lines, "lines": [text] * 200})
    quiet.send(quiet.points(range(1, 3)))
    ingest = Ingest()
    ticks = next(count for count in range(1, 100) if ingest.tick() and quiet.steps())
    assert ticks <= 6, "32 MB of the flooding run are in front of it; a tick stores 2 MB"
    quiet.send(quiet.points(range(3, 5)))
    ingest.tick()
    assert quiet.acked() == {"points/0": 4}, "once read ahead, the next tick has it"
    flood = supervisor.acked()["logs/0"]
    while ingest.tick():
        assert supervisor.acked()["logs/0"] >= flood
    assert supervisor.acked() == {"logs/0": 4_000}
    assert common_redis.client().xlen(wire.TELEMETRY) == 0


def test_numbers_that_a_node_reports_as_lost_hold_nothing_back(supervisor: Supervisor) -> None:
    supervisor.send(supervisor.points(range(1, 4)), supervisor.event(1, "hang"))
    supervisor.send(
        {**supervisor.points(range(7, 9)), "lost": [[4, 6]]},
        {**supervisor.event(5, "hang"), "lost": [[2, 4]]},
    )
    supervisor.send({**supervisor.points(range(7, 9)), "lost": [[4, 6]]})  # sent again
    Ingest().tick()
    assert supervisor.acked() == {"points/0": 8, "events/0": 5}
    assert supervisor.steps() == [1, 2, 3, 7, 8]


def _tick_until_read(ingest: Ingest) -> None:
    ingest._claimed_at = 0.0  # a second later
    ingest.tick()


def test_an_invalid_event_of_a_user_stops_nothing(supervisor: Supervisor) -> None:
    supervisor.send(supervisor.event(1, "checkpoint_saved", step=5, path="runs/1/x", tokens=[1]))
    supervisor.send(supervisor.points(range(1, 4)))
    ingest = Ingest()
    ingest.tick()
    assert (supervisor.steps(), ingest.decoder.dropped) == ([1, 2, 3], {})
    event = RunEvent.objects.get(run=supervisor.run, type="invalid_event")
    assert event.data["type"] == "checkpoint_saved" and "tokens" in event.data["problem"]
    assert event.data["data"]["tokens"] == [1]


def test_an_event_that_is_too_large_leaves_a_record(supervisor: Supervisor) -> None:
    supervisor.send(supervisor.event(1, "measured", values="x" * MAX_EVENT_BYTES))
    assert Ingest().tick() == 1
    event = RunEvent.objects.get(run=supervisor.run, type="invalid_event")
    assert event.data["type"] == "measured" and "1,000,013 bytes" in event.data["problem"]
    assert "data" not in event.data


def test_an_entry_that_fails_three_times_becomes_a_dead_letter(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = loop.incoming_store

    def fail_on_five(incoming: Any, **options: Any) -> Any:
        if any(5 in block.step for _, block in incoming.points):
            raise TypeError("a fault")
        return store(incoming, **options)

    supervisor.send(supervisor.points(range(1, 4)))
    supervisor.send(supervisor.points(range(5, 7)))
    supervisor.send(supervisor.points(range(7, 9)))
    ingest = Ingest()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "incoming_store", fail_on_five)
        ingest.tick()
        assert supervisor.steps() == [1, 2, 3, 7, 8]  # the others are stored at once
        for failures in (1, 2, 3):
            assert DeadLetter.objects.exists() == (failures == 3)
            _tick_until_read(ingest)
    letter = DeadLetter.objects.get()
    assert (letter.code, letter.reason) == ("failed", "TypeError: a fault")
    assert common_redis.client().xlen(wire.TELEMETRY) == 0
    # after the fault is repaired, an operator retries it, long after its envelope expired
    operator = factories.user("olga", Role.OPERATOR)
    dead_letters.dead_letter_retry(letter=letter, by=operator)
    _tick_until_read(ingest)
    assert sorted(supervisor.steps()) == [1, 2, 3, 5, 6, 7, 8]
    assert DeadLetter.objects.get().state == "retried"


def test_a_retried_message_is_valid_at_the_time_of_its_first_writing(
    supervisor: Supervisor,
) -> None:
    supervisor.send({"stream": "unknown"})
    ingest = Ingest()
    ingest.tick()
    letter = DeadLetter.objects.get()
    fields = {
        wire.FIELD_MESSAGE.encode(): bytes(letter.body),
        b"retry": retry_stamp.stamp(bytes(letter.body), letter.written).encode(),
    }
    message = fields[wire.FIELD_MESSAGE.encode()]
    assert retry_stamp.first_written(fields, message) == letter.written
    assert retry_stamp.first_written(fields, b"another message") is None
    assert retry_stamp.first_written({**fields, b"retry": b"forged:x"}, message) is None
    dead_letters.dead_letter_retry(letter=letter, by=factories.user("olga", Role.OPERATOR))
    _tick_until_read(ingest)
    letter.refresh_from_db()
    assert (letter.state, letter.failures) == ("open", 2)  # it failed again


def test_an_entry_that_ends_the_process_becomes_a_dead_letter(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """The process ends without any handler, as by SIGKILL."""

    store = loop.incoming_store

    def kill_on_five(incoming: Any, **options: Any) -> Any:
        if any(5 in block.step for _, block in incoming.points):
            raise Killed
        return store(incoming, **options)

    supervisor.send(supervisor.points(range(1, 4)))
    supervisor.send(supervisor.points(range(5, 7)))
    monkeypatch.setattr(loop, "incoming_store", kill_on_five)
    for _ in range(4):  # two store it with the other entry, two alone
        with pytest.raises(Killed):
            Ingest(name="same").tick()
    Ingest(name="same").tick()
    letter = DeadLetter.objects.get()
    assert "Each of 3 attempts ended the process" in letter.reason
    assert supervisor.steps() == [1, 2, 3]
    assert common_redis.client().xlen(wire.TELEMETRY) == 0
    assert failure_counts.counted(common_redis.client(), wire.TELEMETRY) == set()


def test_entries_of_an_ended_process_are_stored_together(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart while much is read ahead must not store each entry in a transaction of its own."""
    for first in range(1, 51, 5):
        supervisor.send(supervisor.points(range(first, first + 5)))
    assert len(Ingest(name="same")._read()) == 10  # and the process ends
    store, calls = loop.incoming_store, []

    def counted(incoming: Any, **options: Any) -> Any:
        calls.append(len(failure_counts.counted(common_redis.client(), wire.TELEMETRY)))
        if len(calls) == 1:
            raise OperationalError("the database is unavailable")
        return store(incoming, **options)

    monkeypatch.setattr(loop, "incoming_store", counted)
    ingest = Ingest(name="same")
    with pytest.raises(OperationalError):
        ingest.tick()
    ingest.tick()
    assert calls == [10, 10] and supervisor.steps() == [*range(1, 51)]
    assert common_redis.client().xlen(wire.TELEMETRY) == 0
    assert failure_counts.counted(common_redis.client(), wire.TELEMETRY) == set()


@pytest.fixture
def killable_redis(
    tmp_path_factory: pytest.TempPathFactory, settings: Any
) -> Iterator[RedisServer]:
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="orrery-redis-"))
    server = RedisServer(directory).start()
    settings.REDIS_URL = server.url
    common_redis.reset()
    yield server
    server.stop()
    common_redis.reset()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.django_db(transaction=True)
def test_the_loop_continues_after_redis_loses_its_data(
    owner: User, killable_redis: RedisServer
) -> None:
    on = factories.node(devices=1)
    supervisor = Supervisor(on, factories.running(factories.run(owner), on))
    ingest = Ingest()
    worker = threading.Thread(target=_run_and_close, args=(ingest,))
    worker.start()
    try:
        supervisor.send(supervisor.points(range(1, 4)))
        _until(lambda: supervisor.acked().get("points/0") == 3)
        killable_redis.kill()
        time.sleep(0.3)
        killable_redis.start()  # empty: no stream, group or acknowledgements
        _until(lambda: supervisor.send(supervisor.points(range(1, 8))) is None)
        _until(lambda: supervisor.acked().get("points/0") == 7)
    finally:
        ingest.stop.set()
        worker.join(90)
    assert supervisor.steps() == list(range(1, 8))


def _run_and_close(ingest: Ingest) -> None:
    from django.db import connection

    try:
        ingest.run()
    finally:
        connection.close()


def _until(done: Any) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            if done():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_a_running_attempt_is_compared_with_its_prediction_after_some_steps(
    supervisor: Supervisor,
) -> None:
    ingest, predicted = Ingest(), supervisor.run.prediction
    slow = {"step_time_s": lambda step: 3 * predicted["step_time_s"], "loss": float}
    misses = RunEvent.objects.filter(run=supervisor.run, type="prediction_missed")
    for steps in (range(1, 3), range(3, 29)):
        supervisor.send(supervisor.points(steps, **slow))
        ingest.tick()
    assert not misses.exists()
    supervisor.send(supervisor.points(range(29, 40), **slow))
    ingest.tick()
    event = misses.get()
    assert (event.data["metric"], event.attempt) == ("step_time_s", 1) and event.data[
        "ratio"
    ] == pytest.approx(3)
    supervisor.send(supervisor.points(range(40, 120), **slow))
    ingest.tick()
    assert misses.count() == 1
