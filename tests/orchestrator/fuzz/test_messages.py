"""Random mutations of every kind of message: no reader stops, and the next good one is applied.

`make test` runs a short part; ORRERY_TEST_MATRIX=full, as in `make test-all`, 100,000 mutations.
ORRERY_FUZZ_MUTATIONS is another number of them; ORRERY_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.redis import client
from orchestrator.common.stream_groups import StreamEntry
from orchestrator.dead_letters.models import DeadLetter
from orchestrator.fleet.selectors import node_secret
from orchestrator.fleet.services import join_token_create
from orchestrator.runs.models import Attempt, AttemptShare, Run
from orchestrator.scheduling.loop import _handle_report
from orchestrator.scheduling.reports import delivery, heartbeat_handler
from orchestrator.scheduling.reports.delivery import Delivery
from orchestrator.scheduling.reports.inbox import Entry
from orchestrator.scheduling.reports.silence import Liveness, NewHeartbeat
from orchestrator.telemetry.ingest import Ingest
from orchestrator.telemetry.models import Cursor
from tests import factories
from tests.matrix import FULL
from tests.orchestrator.fuzz.mutations import as_json, damaged, mutated
from tests.orchestrator.scheduling.conftest import Broker, broker
from workers.agent.attempts import Attempts
from workers.agent.orders import OrderConsumer
from workers.contracts.wire import envelope, names
from workers.contracts.wire import liveness as wire

__all__ = ["broker"]
# a limit against hangs: 35,000 mutations take ten minutes on a busy machine
pytestmark = [pytest.mark.django_db, pytest.mark.timeout(5400)]

# over all kinds
MUTATIONS = int(os.environ.get("ORRERY_FUZZ_MUTATIONS", "100000" if FULL else "1000"))
SEED = int(os.environ.get("ORRERY_FUZZ_SEED", "1"))
SHARES = {"reports": 0.35, "telemetry": 0.3, "heartbeats": 0.2, "orders": 0.1, "leases": 0.05}


def report_entry(number: int, text: bytes) -> Entry:
    return Entry(StreamEntry(names.REPORTS, b"%d-0" % number, {}), text)


class Sender:
    """A node with a running attempt; makes sealed messages, good and mutated ones."""

    def __init__(self, owner: User) -> None:
        self.node = factories.node("n1", devices=2)
        self.attempt = factories.running(factories.run(owner, devices=2), self.node)
        self.secret = node_secret(self.node)
        self.random = random.Random(SEED)

    def sealed(self, kind: str, body: dict[str, Any], *, secret: bytes = b"") -> bytes:
        now = time.time()
        secret = secret or self.secret
        return envelope.seal(secret, kind, body, ttl_s=600, now=now, node=self.node.name).encode()

    def bad(self, kind: str, body: dict[str, Any], *, secret: bytes = b"") -> bytes:
        """One mutation: of the body before it is sealed, or of the sealed bytes."""
        if self.random.random() < 0.15:
            return damaged(self.sealed(kind, body, secret=secret), self.random)
        text = as_json(mutated({"kind": kind, "body": body}, self.random))
        changed = json.loads(text)
        inner = changed.get("body") if isinstance(changed, dict) else None
        return self.sealed(kind, inner if isinstance(inner, dict) else body, secret=secret)

    def restore(self) -> None:
        """The attempt runs again, whatever the messages have made of it."""
        Attempt.objects.filter(pk=self.attempt.pk).update(
            state="running", exit_class="", exit=None, ended=None, requested=""
        )
        AttemptShare.objects.filter(attempt=self.attempt).update(state="running", exit=None)
        Run.objects.filter(pk=self.attempt.run_id).update(
            state="running", exit=None, ended=None, attempt_number=1, requested=""
        )


@pytest.fixture
def sender(broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(delivery, "_RETRY_S", 0.0)
    logging.disable(logging.CRITICAL)
    yield Sender(owner)
    logging.disable(logging.NOTSET)


def count(kind: str) -> range:
    return range(int(MUTATIONS * SHARES[kind]))


def report_bodies(sender: Sender) -> list[tuple[str, dict[str, Any]]]:
    """`(kind, body)` of every report."""
    head = {
        "attempt_id": str(sender.attempt.pk),
        "fence": str(sender.attempt.fence),
        "node": sender.node.name,
        "seq": 1,
        "time": time.time(),
    }
    checkpoint = {"step": 10, "tokens": 640, "bytes": 40, "path": "runs/1/checkpoints/step-10"}
    data = {
        "launching": {"pid": 4242},
        "running": {"ranks": [0, 1]},
        "event": {"type": "hang", "rank": 1, "data": {"step": 3, "ranks": [1], "phase": "step"}},
        "checkpoint": checkpoint,
        "artifact": {"name": "trace", "path": "runs/1/attempt-1/rank-0/trace.json", "bytes": 3},
        "exited": {"class": "hang", "reason": "no step", "rank": 1, "step": 4, "code": 1},
    }
    reports = [(names.KIND_REPORT, {**head, "type": type_, "data": data[type_]}) for type_ in data]
    token = join_token_create(by=None)
    inventory = factories.inventory("n2").to_dict()
    join = {"request": envelope.join_request(token, name="n2"), "inventory": inventory}
    return [*reports, (names.KIND_JOIN, join)]


def test_reports(sender: Sender) -> None:
    reports = Delivery(_handle_report)
    bodies = report_bodies(sender)
    for number in count("reports"):
        kind, body = sender.random.choice(bodies)
        entry = report_entry(number + 1, sender.bad(kind, body))
        reports.deliver(entry)
        while (again := reports.due()) is not None:
            reports.deliver(again)
        if number % 20 == 0:
            sender.restore()
            DeadLetter.objects.all().delete()
    sender.restore()
    exited = dict(bodies[5][1], data={"class": "ok", "reason": "done"})
    assert reports.deliver(report_entry(10**6, sender.sealed(names.KIND_REPORT, exited)))
    assert Attempt.objects.get(pk=sender.attempt.pk).exit_class == "ok"


def test_heartbeats(sender: Sender) -> None:
    seen = [{"fence": str(sender.attempt.fence), "state": "running"}]
    samples = [{"index": 0, "utilization": 0.9, "memory_used_bytes": 7, "processes": [1]}]
    body = {"node": "n1", "time": time.time(), "samples": samples, "attempts": seen}
    body["inventory"] = factories.inventory("n1", devices=2).to_dict()
    for _ in count("heartbeats"):
        heartbeat_handler.apply(
            [NewHeartbeat("n1", time.time(), sender.bad(names.KIND_HEARTBEAT, body))]
        )
    del body["inventory"]
    stamp = time.time() + 7.0
    heartbeat_handler.apply([NewHeartbeat("n1", stamp, sender.sealed(names.KIND_HEARTBEAT, body))])
    sender.node.refresh_from_db()
    assert sender.node.last_heartbeat is not None
    assert sender.node.last_heartbeat.timestamp() == pytest.approx(stamp, rel=0, abs=0.001)


def telemetry_body(sender: Sender, first: int) -> dict[str, Any]:
    head = {"run": str(sender.attempt.run_id), "attempt": 1, "rank": 0}
    seq = [first, first + 1]
    points = {"v": 1, **head, "seq": seq, "step": seq, "tokens": seq, "time": [1.0, 2.0]}
    points["values"] = {"loss": [1.0, "NaN"], "lr": [0.1, None]}
    event = {**head, "seq": first, "time": 3.0, "type": "checkpoint_saved"}
    event["data"] = {"step": 1, "tokens": 1, "path": "runs/1/x", "bytes": 1}
    lines = {"first_seq": first, "time": 4.0, "lines": ["one", "two"]}
    return {
        "run": head["run"],
        "attempt": 1,
        "attempt_id": str(sender.attempt.pk),
        "fence": str(sender.attempt.fence),
        "batches": [
            {"stream": "points", "rank": 0, "batch": points},
            {"stream": "events", "rank": 0, "events": [event]},
            {"stream": "logs", "rank": 0, **lines},
        ],
    }


def test_telemetry(sender: Sender) -> None:
    redis, ingest = client(), Ingest(name="fuzz")

    def drain() -> None:
        for _ in range(20):
            if not redis.xlen(names.TELEMETRY):
                return
            ingest._claimed_at = 0.0
            ingest.tick()
        raise AssertionError("entries stay in the stream")

    for number in count("telemetry"):
        text = sender.bad(names.KIND_TELEMETRY, telemetry_body(sender, 2 * number + 1))
        fields: dict[Any, Any] = {names.FIELD_NODE: "n1", names.FIELD_MESSAGE: text}
        if sender.random.random() < 0.05:
            fields = {damaged(b"node", sender.random): text}
        redis.xadd(names.TELEMETRY, fields)
        if number % 10 == 9:
            drain()
    good = telemetry_body(sender, 10**8)
    text = sender.sealed(names.KIND_TELEMETRY, good)
    redis.xadd(names.TELEMETRY, {names.FIELD_NODE: "n1", names.FIELD_MESSAGE: text})
    drain()
    cursor = Cursor.objects.get(run=sender.attempt.run_id, attempt=1, rank=0, stream="points")
    assert json.loads(cursor.ranges)[-1] == [10**8, 10**8 + 1]


def test_leases(sender: Sender) -> None:
    redis, heard = client(), Liveness()
    for _ in count("leases"):
        for key in (wire.leases_key("n1"), wire.REVOKED):
            field = damaged(str(sender.attempt.fence).encode(), sender.random)
            redis.hset(key, field, damaged(b"1790000000", sender.random))
        redis.xadd(wire.heartbeat_key("n1"), {damaged(b"m", sender.random): b"text"}, maxlen=1)
        heard.poll(redis, ["n1"], {"n1": [str(sender.attempt.fence)]})
        heard.node_silence("n1")
        redis.delete(wire.leases_key("n1"), wire.REVOKED)
    redis.xadd(wire.heartbeat_key("n1"), {wire.FIELD_BEAT: "text"}, maxlen=1, approximate=False)
    assert [beat.node for beat in heard.poll(redis, ["n1"])] == ["n1"]
    redis.delete(wire.heartbeat_key("n1"))


def test_orders(sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[str] = []
    monkeypatch.setattr(
        Attempts, "_spawn", lambda self, run_dir, fence, user: spawned.append(fence)
    )
    monkeypatch.setattr(Attempts, "_report_failed", lambda *_: None)
    home = tmp_path / "home"
    home.mkdir()
    attempts = Attempts(home, "n1", home / "node.json")
    agent = SimpleNamespace(
        attempts=attempts, report_unknown=lambda order: None, answer_probe=lambda order: None
    )
    consumer = OrderConsumer(node="n1", secret=sender.secret, redis_url="redis://", agent=agent)
    lines = Path("tests/workers/contracts/v1/messages.jsonl").read_text().splitlines()
    recorded = {row["contract"]: row["document"] for row in map(json.loads, lines)}
    launch = {**recorded["LaunchOrder"], "run_dir": "runs/12/attempt-1"}
    keep = {"source": "runs/12/checkpoints/step-1", "target": "runs/13/checkpoints/step-1"}
    orders = [
        (names.TASK_LAUNCH, names.KIND_LAUNCH, launch),
        (names.TASK_CONTROL, names.KIND_CONTROL, recorded["ControlOrder"]),
        (names.TASK_PROBE, names.KIND_PROBE, recorded["ProbeOrder"]),
        (names.TASK_KEEP, names.KIND_KEEP, keep),
    ]
    for _ in count("orders"):
        task, kind, body = sender.random.choice(orders)
        text = sender.bad(kind, body).decode("utf-8", "replace")
        consumer.app.tasks[task](text)
    good = {**launch, "fence": "f00d", "run_dir": "runs/99/attempt-1"}
    consumer.app.tasks[names.TASK_LAUNCH](sender.sealed(names.KIND_LAUNCH, good).decode())
    assert spawned[-1] == "f00d"
    assert list(tmp_path.iterdir()) == [home], "an order wrote outside the node's home"
