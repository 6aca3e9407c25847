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
from orchestrator.common import live
from orchestrator.common import redis as common_redis
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
        self.put({wire.FIELD_NODE: node or self.on.name, wire.FIELD_MESSAGE: sealed})

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
    assert ingest.decoder.dropped == {"refused": 1}
    assert supervisor.steps() == [1, 2, 5, 6]


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
    monkeypatch.setattr(loop, "_DEAD_MS", 50)
    supervisor.send(supervisor.points(range(1, 6)))
    dead = Ingest(name="dead")
    assert len(dead._read()) == 1  # read, then killed before its commit
    supervisor.send(supervisor.points(range(6, 9)))
    living = Ingest(name="living")
    time.sleep(0.1)
    living.tick()
    assert sorted(supervisor.steps()) == list(range(1, 9))
    living._claimed_at = 0.0
    time.sleep(0.1)
    living.tick()
    names = [
        consumer["name"]
        for consumer in common_redis.client().xinfo_consumers(wire.TELEMETRY, wire.TELEMETRY_GROUP)
    ]
    assert names == [b"living"]


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
