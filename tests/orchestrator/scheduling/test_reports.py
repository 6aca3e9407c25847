"""Reports: joins, heartbeats, states; forged, foreign, stale or repeated ones are ignored."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.fleet import selectors as fleet_selectors
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs.models import Attempt, Checkpoint, Run, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports import heartbeat_handler
from orchestrator.scheduling.reports.handler import dropped
from orchestrator.scheduling.reports.silence import NewHeartbeat
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.wire import envelope, names, versions

pytestmark = pytest.mark.django_db


def placed(owner: User, *, devices: int = 1) -> Attempt:
    run = factories.run(owner, devices=devices)
    services.tick()
    return Attempt.objects.select_related("run").get(run=run)


def test_a_join_reply_completes_the_secret(broker: Broker) -> None:
    token = fleet.join_token_create(by=None)
    request = envelope.join_request(token, name="n9")
    body = {"request": request, "inventory": factories.inventory("n9").to_dict()}
    token_id, key = envelope.join_token_parts(token)
    text = envelope.seal(key, names.KIND_JOIN, body, ttl_s=60, now=time.time(), node=token_id)
    replies = []
    for _ in range(2):  # an entry may be read twice
        assert services.report(text)
        replies.append(json.loads(broker.client.lpop(names.join_reply_key(request["nonce_a"]))))
    assert replies[0] == replies[1]
    name, secret = envelope.join_accept(token, request, replies[0])
    node = Node.objects.get(name="n9")
    assert name == "n9" and FakeNode(node).sealed("x", {}, nonce="1", now=0.0) == envelope.seal(
        secret, "x", {}, ttl_s=60, now=0.0, node="n9", nonce="1"
    )
    again = envelope.join_request(token, name="n10")
    body = {"request": again, "inventory": factories.inventory("n10").to_dict()}
    services.report(
        envelope.seal(key, names.KIND_JOIN, body, ttl_s=60, now=time.time(), node=token_id)
    )
    assert (
        "used before"
        in json.loads(broker.client.lpop(names.join_reply_key(again["nonce_a"])))["refused"]
    )
    assert not Node.objects.filter(name="n10").exists()


def test_reports_move_a_run_to_its_end_and_free_its_devices(broker: Broker, owner: User) -> None:
    node, attempt = FakeNode(factories.node("n1")), placed(owner, devices=2)
    seen = []
    reports: list[tuple[str, dict[str, Any]]] = [("launching", {}), ("running", {})]
    reports.append(("exited", {"class": "ok", "reason": "done"}))
    for kind, data in reports:
        assert node.send_report(attempt, kind, **data) and node.send_report(attempt, kind, **data)
        attempt.refresh_from_db()
        seen.append((attempt.state, Run.objects.get(pk=attempt.run_id).state))
    assert seen == [("launching", "starting"), ("running", "running"), ("exited", "finished")]
    assert not Allocation.objects.filter(released=None).exists()
    assert (
        node.send_report(attempt, "running")
        and Run.objects.get(pk=attempt.run_id).state == "finished"
    )


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"secret": b"another"}, "forged"),
        ({"now": time.time() - 1000}, "expired"),
        ({"node": "unknown-node"}, "unknown"),
    ],
)
def test_unreadable_entries_are_dropped(
    broker: Broker, owner: User, wrong: dict[str, Any], code: str
) -> None:
    node, before = factories.node("n1"), dropped[code]
    attempt = placed(owner)
    body = {
        "attempt_id": str(attempt.pk),
        "fence": str(attempt.fence),
        "node": "n1",
        "seq": 1,
        "time": 1.0,
        "type": "running",
    }
    assert not services.report(FakeNode(node).sealed(names.KIND_REPORT, body, **wrong))
    assert dropped[code] == before + 1
    attempt.refresh_from_db()
    assert attempt.state == "assigned"
    assert services.report(FakeNode(node).sealed(names.KIND_REPORT, body)), (
        "the same body is accepted with a valid seal"
    )


def test_malformed_entries_are_dropped() -> None:
    for text in (b"", b"\xff\xfe", "x" * 64 + ".{}", "no envelope"):
        assert not services.report(text)


def test_a_stale_fence_and_a_foreign_node_change_nothing(broker: Broker, owner: User) -> None:
    own, other = factories.node("n1", devices=1), factories.node("n2", devices=1)
    attempt = placed(owner)
    assert attempt.placement[0]["node"] == "n1"
    FakeNode(own).send_report(attempt, "running", fence="0" * 32)
    FakeNode(other).send_report(attempt, "running")
    FakeNode(other).exited(attempt, "ok")
    attempt.refresh_from_db()
    assert attempt.state == "assigned"


def test_a_gang_runs_when_every_node_reports_running_also_by_heartbeat(
    broker: Broker, owner: User
) -> None:
    nodes = [factories.node(name, devices=2) for name in ("n1", "n2")]
    attempt = placed(owner, devices=4)
    FakeNode(nodes[0]).send_report(attempt, "running")
    attempt.refresh_from_db()
    assert attempt.state == "launching"
    FakeNode(nodes[1]).beat(attempt, state="running")
    attempt.refresh_from_db()
    assert attempt.state == "running" and Run.objects.get(pk=attempt.run_id).state == "running"


def test_the_first_cause_wins_and_other_nodes_are_killed(broker: Broker, owner: User) -> None:
    nodes = [factories.node(name, devices=2) for name in ("n1", "n2")]
    attempt = placed(owner, devices=4)
    for node in nodes:
        FakeNode(node).send_report(attempt, "running")
        broker.orders(node)
    # a rank that lost its peer may report first
    FakeNode(nodes[1]).exited(
        attempt, "infrastructure", reason="Connection closed by peer", time=10.0
    )
    [(kind, order)] = broker.orders(nodes[0])
    assert (kind, order["action"]) == ("control", "kill") and broker.orders(nodes[1]) == []
    assert Allocation.objects.filter(released=None).count() == 4, "held until all nodes have exited"
    FakeNode(nodes[0]).exited(
        attempt, "user_error", reason="ValueError: bad data", rank=1, time=11.0
    )
    attempt.refresh_from_db()
    assert attempt.exit_class == "user_error" and attempt.exit["reason"] == "ValueError: bad data"
    assert attempt.exit["node"] == "n1" and not Allocation.objects.filter(released=None).exists()
    assert Run.objects.get(pk=attempt.run_id).state == "failed"


def test_checkpoints_and_events_are_recorded_once(broker: Broker, owner: User) -> None:
    node, attempt = FakeNode(factories.node("n1")), placed(owner)
    event = {"type": "rank_exited", "rank": 1, "data": {"code": -9}}
    for _ in range(2):
        node.seq = 7
        node.send_report(attempt, "event", **event)
        node.send_report(
            attempt,
            "checkpoint",
            step=5,
            tokens=50,
            bytes=9,
            path=f"runs/{attempt.run_id}/checkpoints/step-5",
        )
    assert Checkpoint.objects.filter(run=attempt.run).values_list("step", "bytes").get() == (5, 9)
    for size in (7, 8):
        node.send_report(
            attempt,
            "artifact",
            name="rank-0-profile",
            path=f"runs/{attempt.run_id}/attempt-1/rank-0/profile",
            bytes=size,
        )
    assert attempt.run.artifacts.values_list("name", "bytes").get() == (
        "attempt-1-rank-0-profile",
        8,
    )
    others = f"runs/{attempt.run_id}0/checkpoints/step-6"
    node.send_report(attempt, "checkpoint", step=6, path=others)
    assert dropped["path"] >= 1
    assert not Checkpoint.objects.filter(run=attempt.run, step=6).exists()
    row = RunEvent.objects.get(run=attempt.run, type="rank_exited")
    assert (row.rank, row.data["code"], row.attempt) == (1, -9, 1)


def test_a_node_is_ordered_to_kill_an_ended_attempt(broker: Broker, owner: User) -> None:
    from datetime import timedelta

    from orchestrator.common import clock

    node = factories.node("n1")
    attempt = placed(owner)
    FakeNode(node).exited(attempt, "infrastructure")
    broker.orders(node)
    Attempt.objects.filter(pk=attempt.pk).update(ended=clock.now() - timedelta(seconds=60))
    FakeNode(node).beat(attempt)
    assert [(kind, order["action"]) for kind, order in broker.orders(node)] == [("control", "kill")]


def test_heartbeats_of_many_nodes_take_few_statements(broker: Broker, owner: User) -> None:
    nodes = [factories.node(f"n{number}") for number in range(20)]
    beats = []
    for node in nodes:
        fake = FakeNode(node)
        body = {"node": node.name, "time": time.time() + 75, "later_field": 1}
        body |= {"release": versions.RELEASE, "wire": str(versions.WIRE)}
        body |= {"samples": [{"index": 0, "power_w": 7.5}], "dropped_orders": 3}
        beats.append(NewHeartbeat(node.name, time.time(), fake.sealed("heartbeat", body).encode()))
    beats.append(NewHeartbeat("unknown", time.time(), b"junk"))
    beats.append(NewHeartbeat("n0", time.time(), b"forged"))
    with CaptureQueriesContext(connection) as statements:
        assert not heartbeat_handler.apply(beats)
    # one per node inside one executemany
    assert len(statements) <= 8, [query["sql"] for query in statements]
    node = Node.objects.get(name="n3")
    assert 74 < node.clock_skew_s < 76, "the node's clock is ahead"
    assert node.sample["devices"] == [{"index": 0, "power_w": 7.5, "processes": []}]
    assert "3 unreadable messages" in factories.client_for(owner).get("/fleet/n3/").text
    assert factories.api(owner).get("/api/v1/nodes/n3").json()["dropped_orders"] == 3
    assert "orrery_dropped_orders 60.0" in Client().get("/metrics").text


def test_orders_expire_by_the_nodes_clock(broker: Broker, owner: User) -> None:
    node = factories.node("n1")
    Node.objects.update(clock_skew_s=3600.0)
    factories.run(owner)
    services.tick()
    message = broker.client.rpop(names.node_queue(node.name))
    text = json.loads(base64.b64decode(json.loads(message)["body"]))[0][0]
    node.refresh_from_db()
    secret = fleet_selectors.node_secret(node)
    envelope.open_envelope(secret, text, kind="launch", now=time.time() + 3600)
