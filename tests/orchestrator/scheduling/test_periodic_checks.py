"""Periodic checks: a silent node fails nothing; attempts of a lost node end once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import periodic_checks, services
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports import attempt_end
from orchestrator.scheduling.reports.missing_attempts import Presence
from orchestrator.scheduling.reports.silence import Liveness, _Mark
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.wire import liveness

pytestmark = pytest.mark.django_db
LONG_AGO = -1e6


def running(owner: User, *names: str, devices: int = 1) -> tuple[Attempt, list[Node]]:
    nodes = [factories.node(name, devices=devices) for name in names]
    run = factories.run(owner, devices=devices * len(names))
    services.tick()
    attempt = Attempt.objects.select_related("run").get(run=run)
    for node in nodes:
        FakeNode(node).send_report(attempt, "running")
    attempt.refresh_from_db()
    return attempt, nodes


def actions(broker: Broker, node: Node) -> list[str]:
    return [order.get("action", kind) for kind, order in broker.orders(node)]


def silence(node: Node, seconds: float, **leases: float) -> Liveness:
    """A reading of a broker that has been observed for an hour: a node silent for this long.

    `leases` is `{fence: seconds}` since attempts on the node renewed.
    """
    heard = Liveness()
    for at in range(0, 3600):
        heard.update(1e9 + at, now=float(at))
    broker_now = 1e9 + 3600.0
    heard._nodes[node.name] = _Mark(broker_now - seconds, heard.observed_s - seconds)
    for fence, renewed_s in leases.items():
        mark = _Mark(broker_now - renewed_s, heard.observed_s - renewed_s)
        heard._leases[fence, node.name] = mark
    heard.broker_now = broker_now
    return heard


def test_a_silent_node_fails_nothing_and_a_lost_one_requeues_its_run(
    broker: Broker, owner: User, settings: Any
) -> None:
    attempt, [node] = running(owner, "n1")
    lost_s = settings.ENV.node_lost_s
    assert services.reap(heard=silence(node, lost_s - 1)) == 0
    node.refresh_from_db()
    assert node.health == "silent" and Run.objects.get().state == "running"
    assert services.reap(heard=silence(node, lost_s), drained=False) == 0, "its exit may wait"
    assert services.reap(heard=silence(node, lost_s)) == 1
    attempt.refresh_from_db()
    run = Run.objects.get()
    assert (attempt.exit_class, run.state, run.budgets_used) == ("lost", "queued", {"lost": 1})
    assert RunEvent.objects.filter(run=run, type="node_lost").count() == 1
    assert not Allocation.objects.filter(released=None).exists()
    assert broker.client.hexists(liveness.REVOKED, str(attempt.fence)), "its ranks must stop"
    assert services.reap(heard=silence(node, lost_s)) == 0


def test_an_attempt_that_renews_its_lease_outlives_its_agent(
    broker: Broker, owner: User, settings: Any
) -> None:
    attempt, [node] = running(owner, "n1")
    Node.objects.update(health="silent")
    renewed = {str(attempt.fence): 3.0}
    assert services.reap(heard=silence(node, 600.0, **renewed)) == 0
    node.refresh_from_db()
    assert node.health == "silent", "no run starts there, but it is not lost"
    expired = {str(attempt.fence): settings.ENV.node_lost_s}
    assert services.reap(heard=silence(node, 600.0, **expired)) == 1


def test_a_restarted_scheduler_marks_no_node_silent(broker: Broker, owner: User) -> None:
    _, [node] = running(owner, "n1")
    heard = Liveness()
    heard.update(2e9, [("n1", b"1000000000000-0", b"old")], now=0.0)
    services.reap(heard=heard)
    node.refresh_from_db()
    assert node.health == "up"


def test_a_lost_node_ends_the_gang(broker: Broker, owner: User) -> None:
    attempt, [up, lost] = running(owner, "n1", "n2", devices=2)
    actions(broker, up)
    Node.objects.filter(pk=lost.pk).update(health="lost")
    services.reap()
    assert actions(broker, up) == ["kill"]
    FakeNode(up).exited(attempt, "cancelled")
    attempt.refresh_from_db()
    assert attempt.exit_class == "lost" and "n2 was lost" in attempt.exit["reason"]


def test_a_launch_is_repeated_and_then_lost(broker: Broker, owner: User) -> None:
    node = factories.node("n1")
    run = factories.run(owner)
    services.tick()
    assert actions(broker, node) == ["launch"]
    Attempt.objects.update(created=clock.now() - timedelta(seconds=30))
    services.reap()
    services.reap()
    assert actions(broker, node) == ["launch"], "repeated, but not at every pass"
    Attempt.objects.update(created=clock.now() - timedelta(seconds=500))
    services.reap()
    run.refresh_from_db()
    assert (
        Attempt.objects.get().exit_class == "lost"
        and run.state == "queued"
        and "kill" in actions(broker, node)
    )


def test_launches_are_repeated_together_and_some_per_pass(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: Any
) -> None:
    node = factories.node("n1", devices=8)
    for _ in range(8):
        factories.run(owner, devices=1)
    services.tick()
    assert actions(broker, node) == ["launch"] * 8
    Attempt.objects.update(created=clock.now() - timedelta(seconds=30))
    monkeypatch.setattr(periodic_checks, "REPEATS_PER_PASS", 6)
    with django_assert_max_num_queries(24):  # 12 of them of the checks; per attempt: 40 and more
        services.reap()
    assert actions(broker, node) == ["launch"] * 6
    services.reap()
    assert actions(broker, node) == ["launch"] * 2


def test_leases_of_open_attempts_are_read(broker: Broker, owner: User) -> None:
    attempt, nodes = running(owner, "n1", "n2")
    fence = str(attempt.fence)
    assert periodic_checks.open_fences() == {"n1": [fence], "n2": [fence]}
    heard = Liveness()
    broker.client.hset(liveness.leases_key("n2"), fence, "1")
    heard.poll(broker.client, ["n1", "n2"], periodic_checks.open_fences())
    assert heard.lease_silence(fence, "n2") == 0 and heard.lease_silence(fence, "n1") > 1e9
    for node in nodes:
        FakeNode(node).exited(attempt, "ok")
    assert periodic_checks.open_fences() == {}


def test_a_launch_is_given_up_only_if_no_supervisor_can_start_it(
    broker: Broker, owner: User
) -> None:
    factories.node("n1")
    run = factories.run(owner)
    services.tick()
    attempt = Attempt.objects.get()
    Attempt.objects.update(created=clock.now() - timedelta(seconds=500))
    assert services.reap(drained=False) == 0, "its reports may wait"
    broker.client.hset(liveness.leases_key("n1"), str(attempt.fence), "1")
    assert services.reap() == 0, "a supervisor runs it"
    assert not broker.client.hexists(liveness.REVOKED, str(attempt.fence))
    broker.client.hdel(liveness.leases_key("n1"), str(attempt.fence))
    assert services.reap() == 1
    assert broker.client.hexists(liveness.REVOKED, str(attempt.fence))
    run.refresh_from_db()
    assert run.state == "queued"


def test_an_attempt_missing_on_a_node_that_is_up_is_lost(broker: Broker, owner: User) -> None:
    attempt, _ = running(owner, "n1")
    known = Presence()
    known.missing[str(attempt.fence), "n1"] = LONG_AGO
    assert services.reap(known=known, drained=False) == 0, "its exit report may wait"
    assert services.reap(known=known) == 1
    attempt.refresh_from_db()
    assert attempt.exit_class == "lost" and "no longer has this attempt" in attempt.exit["reason"]


@pytest.mark.parametrize("requested", ["", "cancel"])
def test_an_end_that_was_interrupted_is_completed(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    attempt, _ = running(owner, "n1")
    Attempt.objects.filter(pk=attempt.pk).update(requested=requested)
    attempt.refresh_from_db()
    report = {"class": "hang", "reason": "no step"}

    def full(*_: Any, **__: Any) -> None:
        raise OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(attempt_end, "finish", full)
        with pytest.raises(OperationalError):
            attempt_end.node_exited(attempt, node="n1", report=report)
    assert Attempt.objects.get().state == "running", "its node's exit is stored, nothing else"
    assert services.reap() == 1
    attempt.refresh_from_db()
    assert (attempt.state, attempt.exit_class) == ("exited", "hang")
    assert not Allocation.objects.filter(released=None).exists()


def test_a_request_is_repeated_and_escalated(broker: Broker, owner: User, settings: Any) -> None:
    attempt, [node] = running(owner, "n1")
    actions(broker, node)
    runs.run_cancel(run=attempt.run, by=owner)
    known = Presence()
    services.reap(known=known)
    services.reap(known=known)
    assert actions(broker, node) == ["cancel"]
    known.first[str(attempt.fence), "cancel"] -= (
        settings.ENV.cancel_grace_s + periodic_checks.ESCALATE_S + 1
    )
    services.reap(known=known)
    assert actions(broker, node) == ["kill"]
    FakeNode(node).exited(attempt, "cancelled", reason="Cancelled on request.")
    assert Run.objects.get().state == "cancelled"


def test_a_run_cancelled_before_its_order_was_sent_ends_at_once(
    broker: Broker, owner: User, settings: Any
) -> None:
    factories.node("n1")
    run, url = factories.run(owner), settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    services.tick()
    runs.run_cancel(run=Run.objects.get(pk=run.pk), by=owner)
    settings.REDIS_URL = url
    services.reap()
    assert (
        Run.objects.get(pk=run.pk).state == "cancelled"
        and not Allocation.objects.filter(released=None).exists()
    )


def test_a_checkpoint_or_a_profile_is_requested_once(broker: Broker, owner: User) -> None:
    attempt, [node] = running(owner, "n1")
    actions(broker, node)
    for request, action in (
        (runs.run_checkpoint, "checkpoint"),
        (runs.run_memory_snapshot, "memory"),
    ):
        request(run=Run.objects.get(), by=owner)
        services.reap()
        services.reap()
        attempt.refresh_from_db()
        assert actions(broker, node) == [action] and attempt.requested == ""


def test_a_silent_external_run_ends(broker: Broker, owner: User, settings: Any) -> None:
    run = factories.external_run(owner)
    services.reap()
    assert Run.objects.get(pk=run.pk).state == "running"
    before = clock.now() - timedelta(seconds=settings.ENV.external_silent_s + 1)
    Run.objects.filter(pk=run.pk).update(created=before, last_seen=before)
    services.reap()
    run.refresh_from_db()
    assert run.state == "failed" and "sent nothing" in run.exit["reason"]
