"""A tick: rows, allocations and sealed orders of placed runs; reasons, written once, of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import selectors, services
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.placement.reasons import UNDECIDED
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode

pytestmark = pytest.mark.django_db


def test_a_placed_run_has_an_attempt_devices_and_a_sealed_order(
    broker: Broker, owner: User
) -> None:
    node = factories.node("n1", devices=4)
    run = factories.run(owner, devices=2)
    done = services.tick()
    run.refresh_from_db()
    attempt = Attempt.objects.get(run=run)
    assert (run.state, attempt.state, [a.pk for a in done.placed]) == (
        "starting",
        "assigned",
        [attempt.pk],
    )
    assert attempt.dispatched is not None
    assert list(Allocation.objects.order_by("rank").values_list("device__index", "rank")) == [
        (0, 0),
        (1, 1),
    ]
    [(kind, order)] = broker.orders(node)
    assert (
        kind == "launch"
        and order["fence"] == str(attempt.fence)
        and order["local_devices"] == [0, 1]
    )
    assert order["run_dir"] == f"runs/{run.pk}/attempt-1" and order["world_size"] == 2
    assert services.tick().placed == () and broker.orders(node) == []


def test_a_gang_over_two_nodes_gets_ranks_in_order_and_one_rendezvous(
    broker: Broker, owner: User
) -> None:
    nodes = [factories.node(name, devices=2) for name in ("n1", "n2")]
    run = factories.run(owner, devices=4)
    services.tick()
    orders = [broker.orders(node)[0][1] for node in nodes]
    assert [(o["node_rank"], o["nodes"], o["rank_offset"], o["local_ranks"]) for o in orders] == [
        (0, 2, 0, 2),
        (1, 2, 2, 2),
    ]
    assert [o["rendezvous"]["host"] for o in orders] == ["127.0.0.1", "127.0.0.1"]
    assert Allocation.objects.filter(attempt__run=run).count() == 4


def test_reasons_are_written_when_they_change_and_only_then(broker: Broker, owner: User) -> None:
    factories.node("n1", devices=2)
    first, second = factories.run(owner, devices=2), factories.run(owner, devices=1, priority=-1)
    services.tick()
    second.refresh_from_db()
    assert (
        second.wait_reason
        == f"Waiting for 1 device in pool default; 0 of 2 are free. Run {first.pk} holds 2."
    )
    services.tick()  # decides again after the placement, and stores a settled decision
    with CaptureQueriesContext(connection) as queries:
        services.tick()
    assert not [
        query for query in queries.captured_queries if query["sql"].startswith(("UPDATE", "INSERT"))
    ]
    assert len(queries) <= 10, "an idle pass reads a fingerprint"


def test_unavailable_redis_delays_an_order_and_loses_nothing(
    broker: Broker, owner: User, settings: Any
) -> None:
    node = factories.node("n1")
    run, url = factories.run(owner), settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    services.tick()
    attempt = Attempt.objects.get(run=run)
    assert attempt.dispatched is None
    settings.REDIS_URL = url
    services.reap()
    attempt.refresh_from_db()
    assert attempt.dispatched is not None and [kind for kind, _ in broker.orders(node)] == [
        "launch"
    ]


def test_two_schedulers_at_once_place_a_run_once(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second decides from a snapshot of before the first's placement."""
    from orchestrator.common import clock
    from orchestrator.scheduling import tick
    from orchestrator.scheduling.placement import snapshot
    from orchestrator.scheduling.queue import decision_store

    factories.node("n1", devices=2)
    runs_ = [factories.run(owner, devices=2), factories.run(owner, devices=2)]
    old = snapshot.take()
    services.tick()
    decision_store.clear(now=clock.now())
    held = set(Allocation.objects.values_list("pk", flat=True))
    # same run, then another run for the same devices
    for queue in (old.queue, [run for run in old.queue if run.run == runs_[1].pk]):
        stale = snapshot.Snapshot(
            queue, old.nodes, old.reasons, old.resume, old.quotas, old.pool_priority
        )
        monkeypatch.setattr(tick.snapshot, "take", lambda stale=stale: stale)
        assert services.tick().placed == ()
    assert (
        set(Allocation.objects.values_list("pk", flat=True)) == held
        and Attempt.objects.count() == 1
    )
    assert Run.objects.get(pk=runs_[1].pk).state == "queued"


@pytest.fixture
def saved(owner: User, broker: Broker) -> Callable[[], Run]:
    """A run that has saved a checkpoint on n1 and is queued again."""

    def make() -> Run:
        run = factories.run(owner, devices=1)
        services.tick()
        attempt = Attempt.objects.get(run=run)
        node = factories.Node.objects.get(name="n1")
        FakeNode(node).send_report(
            attempt,
            "checkpoint",
            step=10,
            tokens=100,
            bytes=5,
            path=f"runs/{run.pk}/checkpoints/step-10",
        )
        FakeNode(node).exited(attempt, "infrastructure")
        Run.objects.filter(pk=run.pk).update(not_before=None)
        broker.client.flushall()
        return Run.objects.get(pk=run.pk)

    return make


def test_a_requeued_run_resumes_on_the_node_of_its_checkpoint(
    broker: Broker, saved: Callable[[], Run]
) -> None:
    n1 = factories.node("n1", devices=1)
    run = saved()
    assert run.state == "queued"
    factories.node("a-free-node", devices=1)
    services.tick()
    [(_, order)] = broker.orders(n1)
    assert (
        order["resume_from"] == {"path": f"runs/{run.pk}/checkpoints/step-10", "step": 10}
        and order["attempt"] == 2
    )


def test_it_starts_from_the_beginning_elsewhere_if_that_node_is_lost(
    broker: Broker, saved: Callable[[], Run]
) -> None:
    n1 = factories.node("n1", devices=1)
    run = saved()
    other = factories.node("n2", devices=1)
    factories.Node.objects.filter(pk=n1.pk).update(health="lost")
    services.tick()
    [(_, order)] = broker.orders(other)
    assert "resume_from" not in order or order["resume_from"] is None
    event = RunEvent.objects.get(run=run, type="checkpoint_left_behind")
    assert event.data["nodes"] == ["n1"] and "starts from the beginning" in event.data["message"]


def test_a_checkpoint_split_over_nodes_is_not_resumed(broker: Broker, owner: User) -> None:
    nodes = [factories.node(name, devices=1) for name in ("n1", "n2")]
    run = factories.run(owner, devices=2)
    services.tick()
    attempt = Attempt.objects.get(run=run)
    FakeNode(nodes[0]).send_report(
        attempt, "checkpoint", step=10, tokens=1, bytes=5, path=f"runs/{run.pk}/checkpoints/step-10"
    )
    for node in nodes:
        FakeNode(node).exited(attempt, "infrastructure")
        broker.orders(node)
    Run.objects.filter(pk=run.pk).update(not_before=None)
    services.tick()
    assert [order.get("resume_from") for node in nodes for _, order in broker.orders(node)] == [
        None,
        None,
    ]
    assert (
        "is split over n1, n2"
        in RunEvent.objects.get(run=run, type="checkpoint_left_behind").data["message"]
    )


def test_the_queue_shows_each_user_only_visible_runs(
    broker: Broker, owner: User, stranger: User, teammate: User
) -> None:
    factories.node("n1", devices=2)
    holder = factories.run(owner, devices=2, resources={"max_seconds": 50})
    services.tick()
    waiting = factories.run(owner, devices=2)
    [entry] = selectors.queue_visible_to(user=teammate)
    assert (entry.run.pk, entry.position, entry.reason) == (waiting.pk, 1, UNDECIDED)
    services.tick()
    [entry] = selectors.queue_visible_to(user=teammate)
    assert (entry.run.pk, entry.position) == (
        waiting.pk,
        1,
    ) and f"Run {holder.pk} holds 2" in entry.reason
    assert entry.may_start is not None
    assert selectors.queue_visible_to(user=stranger) == []
    assert [a.attempt.run_id for a in selectors.allocations_by_device().values()] == [
        holder.pk,
        holder.pk,
    ]
    seen = selectors.overview(user=owner, runs_shown=9, waiting_shown=9)
    assert (seen.devices, seen.busy, seen.queue.devices) == (2, 2, 2)
    own, count = selectors.own_active(user=owner, runs_shown=9)
    assert [run.pk for run in own] == [run.pk for run in seen.running] == [holder.pk]
    assert count == seen.active == 1
    assert selectors.own_active(user=teammate, runs_shown=9) == ([], 0)
    assert selectors.overview(user=stranger, runs_shown=9, waiting_shown=9).active == 0
    runs.run_cancel(run=waiting, by=owner)
    assert selectors.queue_visible_to(user=owner) == []
