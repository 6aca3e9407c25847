"""The reaper: a silent node fails nothing; attempts of a lost node end once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import reaper, services
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports.presence import Presence
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode

pytestmark = pytest.mark.django_db
LONG_AGO = -1e6  # this process has read reports for a long time


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


def quiet(node: Node, seconds: float) -> None:
    Node.objects.filter(pk=node.pk).update(last_heartbeat=clock.now() - timedelta(seconds=seconds))


def test_a_silent_node_fails_nothing_and_a_lost_one_requeues_its_run(
    broker: Broker, owner: User
) -> None:
    attempt, [node] = running(owner, "n1")
    quiet(node, 20)
    assert services.reap(known=Presence(since=LONG_AGO)) == 0
    node.refresh_from_db()
    assert node.health == "silent" and Run.objects.get().state == "running"
    quiet(node, 100)
    assert services.reap(known=Presence(since=LONG_AGO)) == 1
    attempt.refresh_from_db()
    run = Run.objects.get()
    assert (attempt.exit_class, run.state, run.budgets_used) == ("lost", "queued", {"lost": 1})
    assert RunEvent.objects.filter(run=run, type="node_lost").count() == 1
    assert not Allocation.objects.filter(released=None).exists()
    assert services.reap(known=Presence(since=LONG_AGO)) == 0


def test_a_restarted_scheduler_marks_no_node_silent(broker: Broker, owner: User) -> None:
    _, [node] = running(owner, "n1")
    quiet(node, 1000)
    services.reap(known=Presence())
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


def test_an_attempt_missing_on_a_node_that_is_up_is_lost(broker: Broker, owner: User) -> None:
    attempt, _ = running(owner, "n1")
    known = Presence(since=LONG_AGO)
    known.missing[str(attempt.fence), "n1"] = LONG_AGO
    assert services.reap(known=known) == 1
    attempt.refresh_from_db()
    assert attempt.exit_class == "lost" and "no longer has this attempt" in attempt.exit["reason"]


def test_a_request_is_repeated_and_escalated(broker: Broker, owner: User, settings: Any) -> None:
    attempt, [node] = running(owner, "n1")
    actions(broker, node)
    runs.run_cancel(run=attempt.run, by=owner)
    known = Presence()
    services.reap(known=known)
    services.reap(known=known)
    assert actions(broker, node) == ["cancel"]
    known.first[str(attempt.fence), "cancel"] -= settings.ENV.cancel_grace_s + reaper.ESCALATE_S + 1
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
