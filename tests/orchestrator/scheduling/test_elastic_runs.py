"""Elastic runs through loss, shrinking and growth: sizes, retries, events, orders."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.preemption.growth import EVERY_S, Growth
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.orchestrator.scheduling.test_periodic_checks import silence

pytestmark = pytest.mark.django_db


def elastic(owner: User, *, devices: int = 4, least: int = 1, **more: Any) -> Run:
    train = {"steps": 1000, "seq_len": 16, "checkpoint": {"every_steps": 5}}
    plan = {"dp": devices, "micro_batch_size": 1, "global_batch_size": devices}
    resources = {"min_devices": least}
    return factories.run(owner, plan=plan, train=train, resources=resources, **more)


def newest(run: Run) -> Attempt:
    return Attempt.objects.filter(run=run).order_by("-number")[0]


def begin(run: Run, *nodes: FakeNode, minutes: float = 20.0) -> Attempt:
    """Start the run; its newest attempt, whose ranks have run for some time."""
    services.tick()
    attempt = newest(run)
    by_name = {fake.node.name: fake for fake in nodes}
    for share in attempt.placement:
        by_name[share["node"]].send_report(attempt, "running")
    started = clock.now() - timedelta(minutes=minutes)
    Attempt.objects.filter(pk=attempt.pk).update(started=started)
    return attempt


def saved(run: Run, step: int, settings: Any | None = None) -> None:
    number = newest(run).number
    path = f"runs/{run.pk}/checkpoints/step-{step}"
    runs.checkpoint_record(run=run, attempt=number, step=step, path=path)


def shared(settings: Any) -> None:
    settings.ENV = settings.ENV.model_copy(update={"shared_runs": True})


def test_a_lost_node_shrinks_the_run_without_a_retry(
    broker: Broker, owner: User, settings: Any
) -> None:
    shared(settings)
    first, second = (FakeNode(factories.node(name, devices=2)) for name in ("n1", "n2"))
    run = elastic(owner, least=2)
    assert [size["devices"] for size in run.sizes] == [4, 2]
    attempt = begin(run, first, second)
    saved(run, 5)
    [(_, order)] = broker.orders(first.node)
    assert (order["world_size"], order["plan"]["dp"]) == (4, 4)
    assert "min_devices" not in order["spec"]["resources"]
    # the ranks of n1 lose their peers and exit before n2 is declared lost
    first.exited(attempt, "infrastructure", code=69)
    heard = silence(second.node, settings.ENV.node_lost_s)
    services.reap(heard=heard)
    run.refresh_from_db()
    assert (run.state, run.budgets_used, run.not_before) == ("queued", {}, None)
    waiting = factories.run(owner, devices=2)
    Run.objects.filter(pk=waiting.pk).update(queued_at=clock.now() - timedelta(hours=1))
    services.tick()
    again = newest(run)
    assert (again.number, again.devices) == (2, 2), "it keeps its place"
    [(_, order)] = broker.orders(first.node)
    assert (order["world_size"], order["plan"]["dp"]) == (2, 2)
    assert (order["plan"]["micro_batch_size"], order["plan"]["global_batch_size"]) == (1, 4)
    assert order["spec"]["resources"]["devices"] == 2 and order["resume_from"]["step"] == 5
    event = RunEvent.objects.get(run=run, type="resized")
    assert event.data == {"from": 4, "to": 2, "dp": 2, "accumulation": 2, "cause": "node_lost"}


def test_a_loss_of_an_attempt_alone_uses_the_budget(broker: Broker, owner: User) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    run = elastic(owner)
    fake.exited(begin(run, fake), "lost")
    run.refresh_from_db()
    assert run.budgets_used == {"lost": 1} and run.keeps_place_until is None


def test_it_shrinks_for_a_waiting_gang_and_grows_back(broker: Broker, owner: User) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    run = elastic(owner, least=2)
    attempt = begin(run, fake)
    saved(run, 5)
    gang = factories.run(owner, devices=2)
    Run.objects.filter(pk=gang.pk).update(queued_at=clock.now() - timedelta(minutes=1))
    services.tick()
    attempt.refresh_from_db()
    assert attempt.requested == "preempt" and attempt.resize["cause"] == "waiting_run"
    gang.refresh_from_db()
    assert gang.wait_reason == (
        f"Waiting for run {run.pk} to save a checkpoint and continue on fewer devices."
    )
    event = RunEvent.objects.get(run=run, type="resize_requested")
    assert event.data["by"] == gang.pk and event.data["devices"] == 4
    saved(run, 7)
    fake.exited(attempt, "preempted", step=7)
    services.tick()
    assert (newest(run).devices, newest(gang).devices) == (2, 2)
    assert newest(run).resume_from["step"] == 7
    run.refresh_from_db()
    assert run.budgets_used == {}
    services.tick()
    assert newest(run).number == 2, "it is not asked again"

    smaller, now, growth = begin(run, fake), clock.now(), Growth()
    assert growth.grow(now=now) == [], "the gang holds its devices"
    other = begin(gang, fake)
    fake.exited(other, "ok")
    assert growth.grow(now=now + timedelta(seconds=EVERY_S)) == [], "not free for long enough"
    later = now + timedelta(seconds=EVERY_S + 121)
    assert growth.grow(now=later) == [run.pk]
    smaller.refresh_from_db()
    assert smaller.requested == "preempt" and smaller.resize["cause"] == "free_devices"
    saved(run, 9)
    fake.exited(smaller, "preempted", step=9)
    services.tick()
    assert newest(run).devices == 4
    assert growth.grow(now=later + timedelta(seconds=900)) == []
    sizes = [event.data["to"] for event in RunEvent.objects.filter(run=run, type="resized")]
    assert sizes == [2, 4]


def test_it_does_not_grow_young_or_next_to_a_waiting_run(broker: Broker, owner: User) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    busy = factories.run(owner, devices=2)
    holder = begin(busy, fake)
    run = elastic(owner)
    begin(run, fake, minutes=5)
    assert newest(run).devices == 2
    fake.exited(holder, "ok")
    growth, now = Growth(), clock.now()
    growth.grow(now=now)
    assert growth.grow(now=now + timedelta(seconds=200)) == [], "it has had this size for 5 minutes"
    Attempt.objects.filter(run=run).update(started=now - timedelta(hours=1))
    factories.run(owner, devices=2)
    assert growth.grow(now=now + timedelta(seconds=400)) == [], "the waiting run gets them"
    Run.objects.filter(state="queued").delete()
    Run.objects.filter(pk=run.pk).update(summary={"step": 990, "eta_s": 5.0})
    growth.grow(now=now + timedelta(seconds=500))
    assert growth.grow(now=now + timedelta(seconds=900)) == [], "it ends before that pays off"


def test_a_lower_priority_does_not_shrink_it_and_a_minimum_is_left(
    broker: Broker, owner: User, operator: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    run = elastic(owner, least=2, priority=10)
    attempt = begin(run, fake)
    for devices, priority in ((2, 9), (3, 10), (4, 100)):
        gang = factories.run(operator, devices=devices, priority=priority)
        Run.objects.filter(pk=gang.pk).update(queued_at=clock.now() - timedelta(minutes=1))
        services.tick()
        attempt.refresh_from_db()
        assert attempt.requested == "", (devices, priority)
        Run.objects.filter(pk=gang.pk).delete()
    urgent = factories.run(operator, devices=3, priority=101)  # preempts it completely
    Run.objects.filter(pk=urgent.pk).update(queued_at=clock.now() - timedelta(minutes=1))
    services.tick()
    attempt.refresh_from_db()
    assert attempt.requested == "preempt" and attempt.resize is None
    assert RunEvent.objects.filter(run=run, type="preempted").exists()


def test_without_shared_directories_it_grows_on_its_own_node_only(
    broker: Broker, owner: User
) -> None:
    near, far = FakeNode(factories.node("near", devices=2)), factories.node("far", devices=4)
    Node.objects.filter(pk=far.pk).update(drained=True)
    run = elastic(owner)
    begin(run, near)
    assert newest(run).devices == 2
    Node.objects.filter(pk=far.pk).update(drained=False)
    growth, now = Growth(), clock.now()
    growth.grow(now=now)
    assert growth.grow(now=now + timedelta(seconds=200)) == []
