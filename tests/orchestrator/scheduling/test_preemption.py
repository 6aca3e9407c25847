"""Preemption: who is chosen, that none is asked without need, and that retries are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import clock as time
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.placement.capacity import NodeView
from orchestrator.scheduling.placement.requests import QueuedRun
from orchestrator.scheduling.preemption.victims import Holder, Victims, choose, may_preempt
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.orchestrator.scheduling.test_policy import T, node, run


def holders(*each: Holder) -> dict[int, Holder]:
    return {holder.run: holder for holder in each}


def urgent(devices: int, priority: int = 200) -> QueuedRun:
    return run(99, devices, priority=priority)


def full(*sizes: tuple[int, int]) -> list[NodeView]:
    """One node per entry `(run, devices)`, which the run holds completely."""
    return [
        node(f"n{number}", devices, held=dict.fromkeys(range(devices), holder))
        for number, (holder, devices) in enumerate(sizes)
    ]


def test_only_operators_priorities_preempt_unless_the_holder_is_below_zero() -> None:
    for priority, holder, may in (
        (100, 0, False),
        (101, 0, True),
        (101, 101, False),
        (0, -1, True),
        (-1, -1, False),
        (-1, -2, True),
        (50, 0, False),
    ):
        assert may_preempt(urgent(1, priority), Holder(1, holder, 1, 0.0)) is may


def test_the_lowest_priority_goes_first_then_the_least_unsaved_work() -> None:
    nodes = full((1, 2), (2, 2), (3, 2))
    equal = holders(Holder(1, 0, 2, 900.0), Holder(2, 0, 2, 30.0), Holder(3, 0, 2, 600.0))
    assert choose(urgent(2), nodes, equal, T) == Victims((2,))
    assert choose(urgent(4), nodes, equal, T) == Victims((2, 3))
    low = equal | holders(Holder(1, -5, 2, 900.0))
    assert choose(urgent(2), nodes, low, T) == Victims((1,))


def test_runs_that_do_not_help_stay() -> None:
    # the cheap run 1 frees one device of a node, which cannot hold the gang of two
    nodes = [node("a", 2, held={0: 1, 1: 5}), node("b", 2, held={0: 2, 1: 2})]
    known = holders(Holder(1, 0, 1, 1.0), Holder(2, 0, 2, 500.0), Holder(5, 300, 1, 0.0))
    assert choose(urgent(2), nodes, known, T) == Victims((2,))
    assert choose(urgent(4), nodes, known, T) == Victims()  # run 5 is of higher priority
    assert choose(run(99, 2, priority=200, pool="other"), nodes, known, T) == Victims()


def test_no_run_is_preempted_without_need() -> None:
    nodes = [*full((1, 2)), node("free", 2)]
    assert choose(urgent(2), nodes, holders(Holder(1, 0, 2, 0.0)), T) == Victims()
    leaving = holders(Holder(1, 0, 2, 0.0, leaving=True), Holder(2, 0, 2, 0.0))
    assert choose(urgent(2), full((1, 2), (2, 2)), leaving, T) == Victims()
    fixed = holders(Holder(1, 0, 2, 0.0, fixed=True))
    assert choose(urgent(2), full((1, 2)), fixed, T) == Victims()


def running(owner: User, fake: FakeNode, **spec: Any) -> Run:
    """A run whose ranks have run for ten minutes."""
    item = factories.run(owner, **spec)
    services.tick()
    attempt = Attempt.objects.get(run=item)
    for kind in ("launching", "running"):
        fake.send_report(attempt, kind)
    Attempt.objects.filter(pk=attempt.pk).update(started=time.now() - timedelta(minutes=10))
    return item


def waiting(owner: User, **spec: Any) -> Run:
    """A queued run that has waited for a minute."""
    item = factories.run(owner, **spec)
    Run.objects.filter(pk=item.pk).update(queued_at=time.now() - timedelta(minutes=1))
    return item


@pytest.mark.django_db
def test_a_run_is_preempted_requeued_and_keeps_its_retries(
    broker: Broker, owner: User, operator: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=4))
    first, second = (running(owner, fake, devices=2) for _ in range(2))
    runs.checkpoint_record(
        run=second, attempt=1, step=5, path=f"runs/{second.pk}/checkpoints/step_5"
    )
    broker.orders(fake.node)
    wanted = waiting(operator, devices=2, priority=200)
    services.tick()
    attempt = Attempt.objects.get(run=second)  # less of its work is unsaved
    assert attempt.requested == "preempt"
    assert Attempt.objects.get(run=first).requested == ""
    [(kind, order)] = broker.orders(fake.node)
    assert (kind, order["action"], order["fence"]) == ("control", "preempt", str(attempt.fence))
    event = RunEvent.objects.get(run=second, type="preempted")
    assert event.data["by"] == wanted.pk and "priority 200" in event.data["reason"]
    wanted.refresh_from_db()
    assert wanted.wait_reason == (
        f"Waiting for run {second.pk} to save a checkpoint and stop, because of its priority."
    )
    for _ in range(2):  # no other run is asked meanwhile
        services.tick()
    assert Attempt.objects.filter(requested="preempt").count() == 1

    fake.exited(attempt, "preempted", step=6)
    services.tick()
    second.refresh_from_db()
    wanted.refresh_from_db()
    assert (second.state, second.budgets_used) == ("queued", {})
    assert wanted.state == "starting"
    assert Attempt.objects.get(run=first).requested == ""


@pytest.mark.django_db
def test_no_run_is_preempted_for_a_submitter_or_if_it_is_off(
    broker: Broker, owner: User, operator: User, settings: Any
) -> None:
    fake = FakeNode(factories.node("n1", devices=2))
    running(owner, fake, devices=2)
    waiting(owner, devices=2, priority=100)
    services.tick()
    assert not Attempt.objects.filter(requested="preempt").exists()
    settings.ENV = settings.ENV.model_copy(update={"preemption": False})
    waiting(operator, devices=2, priority=200)
    services.tick()
    assert not Attempt.objects.filter(requested="preempt").exists()


@pytest.mark.django_db
def test_a_run_that_has_just_started_or_waits_for_quota_changes_nothing(
    broker: Broker, owner: User, operator: User
) -> None:
    fake = FakeNode(factories.node("n1", devices=2))
    item = running(owner, fake, devices=2)
    Attempt.objects.filter(run=item).update(started=time.now())
    waiting(operator, devices=2, priority=200)
    services.tick()
    assert not Attempt.objects.filter(requested="preempt").exists()
