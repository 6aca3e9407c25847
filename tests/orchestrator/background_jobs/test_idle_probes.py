"""Idle nodes are probed without a request: which, when again, and never while runs need them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs import idle_probes, retention
from orchestrator.fleet import cordoning, node_probes
from orchestrator.fleet.models import Node, NodeProbe
from orchestrator.scheduling import dispatch, services
from orchestrator.scheduling.models import Allocation
from tests import factories
from tests.node_probe_samples import node_report

pytestmark = pytest.mark.django_db

IDLE_S = 601


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that were ordered to measure."""
    nodes: list[str] = []

    def measure(node: Node, *, seconds: float) -> bool:
        nodes.append(node.name)
        return True

    monkeypatch.setattr(dispatch, "measure", measure)
    return nodes


def idle_node(name: str, **more: Any) -> Node:
    return factories.node(name, devices=2, **more)


def test_an_idle_node_is_probed_once_a_week(clock: Any, ordered: list[str]) -> None:
    node = idle_node("n1")
    assert idle_probes.probe_idle() == {}, "it has just joined"
    clock.advance(IDLE_S)
    assert idle_probes.probe_idle() == {"requested": 1}
    assert idle_probes.probe_idle() == {}, "in progress"
    row = NodeProbe.objects.get()
    assert row.requested_by == ""
    report = node_report(time=clock.now().timestamp())
    node_probes.result_record(node=node, report=report, parameters={})
    clock.advance(6 * 86400)
    assert idle_probes.probe_idle() == {}
    clock.advance(86400)
    assert idle_probes.probe_idle() == {"requested": 1}
    assert ordered == ["n1", "n1"]


def test_a_short_probe_is_followed_by_a_full_one(clock: Any, ordered: list[str]) -> None:
    node = idle_node("n1")
    report = node_report(short=True, time=clock.now().timestamp())
    node_probes.result_record(node=node, report=report, parameters={})
    clock.advance(IDLE_S)
    assert idle_probes.probe_idle() == {"requested": 1}


def test_retention_leaves_the_full_probe_that_delays_the_next(
    clock: Any, ordered: list[str], settings: Any
) -> None:
    settings.ENV = settings.ENV.model_copy(update={"retain_events_days": 1.0})
    node = idle_node("n1")
    for short in (False, True):
        report = node_report(short=short, time=clock.now().timestamp())
        node_probes.result_record(node=node, report=report, parameters={})
        clock.advance(3 * 86400)

    def retain() -> dict[str, int]:
        policies = tuple(each for each in retention.POLICIES if each.name == "node_probes")
        return retention.retain(
            policies=policies, now=clock.now(), dry_run=False, renew=lambda: None
        )

    assert retain() == {"node_probes": 0}
    assert idle_probes.probe_idle() == {}
    clock.advance(2 * 86400)
    assert retain() == {"node_probes": 1}
    assert idle_probes.probe_idle() == {"requested": 1}


def test_a_refused_probe_is_tried_again_after_an_hour(clock: Any, ordered: list[str]) -> None:
    node = idle_node("n1")
    clock.advance(IDLE_S)
    idle_probes.probe_idle()
    node_probes.failure_record(node=node, message="programs use 2 of 2 cores")
    clock.advance(1800)
    assert idle_probes.probe_idle() == {}
    clock.advance(1801)
    assert idle_probes.probe_idle() == {"requested": 1}


def test_one_node_of_a_pool_at_a_time(clock: Any, ordered: list[str]) -> None:
    for name in ("a1", "a2"):
        idle_node(name)
    idle_node("b1", pool="other")
    clock.advance(IDLE_S)
    assert idle_probes.probe_idle() == {"requested": 2}
    assert ordered == ["a1", "b1"]


def test_nodes_that_runs_use_or_wait_for_are_left_alone(
    clock: Any, owner: User, operator: User, ordered: list[str], live_redis: str
) -> None:
    idle_node("n1")
    run = factories.run(owner, devices=2)
    clock.advance(IDLE_S)
    assert idle_probes.probe_idle() == {}, "a run waits"
    services.tick(now=clock.now())
    assert Allocation.objects.filter(attempt__run=run, released=None).exists()
    clock.advance(IDLE_S)
    assert idle_probes.probe_idle() == {}, "a run holds its devices"
    Allocation.objects.update(released=clock.now())
    clock.advance(IDLE_S - 10)
    assert idle_probes.probe_idle() == {}, "the run has just ended"
    run.attempts.update(state="exited")
    run.attempts.get().shares.update(state="exited")
    clock.advance(10)
    node = Node.objects.get(name="n1")
    cordoning.node_cordon(node=node, by=operator, reason="fan")
    assert idle_probes.probe_idle() == {}, "cordoned"
    cordoning.node_uncordon(node=node, by=operator)
    assert idle_probes.probe_idle() == {"requested": 1}


def test_never_if_it_is_off(clock: Any, ordered: list[str], settings: Any) -> None:
    idle_node("n1")
    clock.advance(timedelta(days=1).total_seconds())
    settings.ENV = settings.ENV.model_copy(update={"idle_probe_s": 0.0})
    assert idle_probes.probe_idle() == {}
    assert ordered == []
