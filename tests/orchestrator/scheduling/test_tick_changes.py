"""A pass costs what has changed: budget, constant queries, stored decisions, reasons for all."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext
from kombu.exceptions import BatchPublishError

from orchestrator.accounts.models import Team, TeamMembership, User
from orchestrator.common import clock
from orchestrator.fleet.models import Node, Pool
from orchestrator.runs.models import Attempt, Checkpoint, Run
from orchestrator.scheduling import celery_client, policy, selectors, services
from orchestrator.scheduling.models import Lease, QueueDecision, TeamGuarantee
from orchestrator.scheduling.placement import changes, snapshot
from orchestrator.scheduling.queue import decision_store
from orchestrator.scheduling.tick import REST_LIFE
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker

pytestmark = pytest.mark.django_db


def test_a_pass_places_no_more_than_its_budget_and_the_next_continues(
    broker: Broker, owner: User, settings: Any
) -> None:
    settings.ENV = settings.ENV.model_copy(update={"placements_per_tick": 2})
    factories.node("n1", devices=4)
    waiting = [factories.run(owner) for _ in range(3)]
    first = services.tick()
    assert ([attempt.run_id for attempt in first.placed], first.more) == (
        [waiting[0].pk, waiting[1].pk],
        True,
    )
    assert Run.objects.get(pk=waiting[2].pk).wait_reason.startswith("Starts at the next")
    second = services.tick()
    assert ([attempt.run_id for attempt in second.placed], second.more) == ([waiting[2].pk], False)


def test_the_queries_of_a_snapshot_do_not_grow_with_the_queue(broker: Broker, owner: User) -> None:
    factories.node("n1", devices=1)
    counts = []
    for _ in range(2):
        for _ in range(4):
            run = factories.run(owner)
            Attempt.objects.create(
                run=run, number=1, state="exited", placement=[{"node": "n1", "devices": [0]}]
            )
            Checkpoint.objects.create(run=run, attempt=1, step=5, path=f"runs/{run.pk}/step-5")
        Run.objects.update(attempt_number=1)
        with CaptureQueriesContext(connection) as queries:
            current = snapshot.take()
        assert {item.checkpoint_nodes for item in current.queue} == {("n1",)}
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_a_run_of_an_idle_pool_starts_behind_a_full_queue_of_another(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "QUEUE_LIMIT", 3)
    monkeypatch.setattr(snapshot, "QUEUE_LIMIT", 3, raising=False)
    factories.node("n1", devices=1)
    factories.node("n2", devices=1, pool="idle")
    crowd = [factories.run(owner, devices=4) for _ in range(6)]
    other = factories.run(owner, resources={"pool": "idle"})
    done = services.tick()
    assert [attempt.run_id for attempt in done.placed] == [other.pk]
    waiting = Run.objects.filter(pk__in=[run.pk for run in crowd]).order_by("pk")
    reasons = list(waiting.values_list("wait_reason"))
    assert all(reason for (reason,) in reasons)
    assert "more than 3 runs of pool default are before it" in reasons[-1][0]


def test_a_fingerprint_reads_members_and_guarantees_apart(broker: Broker, owner: User) -> None:
    pool, prints = factories.node("n1", devices=8).pool, []
    factories.run(owner)
    team = Team.objects.create(name="large")
    pools = [pool, *(Pool.objects.create(name=f"p{number}") for number in range(3))]
    for number in range(5):
        team.members.add(factories.user(f"u{number}"))
    for each in pools:
        TeamGuarantee.objects.create(team=team, pool=each, devices=1)
        with CaptureQueriesContext(connection) as queries:
            prints.append(changes.read().fingerprint)
        sql = [each["sql"] for each in queries.captured_queries]
        members = [each for each in sql if TeamMembership._meta.db_table in each]
        assert members and not any(TeamGuarantee._meta.db_table in each for each in members), sql
    assert len(set(prints)) == len(pools)
    TeamGuarantee.objects.filter(pool=pool).update(devices=2)
    assert changes.read().fingerprint not in prints


@pytest.mark.parametrize("change", ["node", "pool", "priority", "allocation"])
def test_a_settled_decision_is_repeated_when_an_input_changes(
    broker: Broker, owner: User, change: str
) -> None:
    node = factories.node("n1", devices=1)
    holder, waiting = factories.run(owner), factories.run(owner)
    factories.run(owner)
    services.tick()
    services.tick()
    before = QueueDecision.objects.get().decided
    services.tick()
    assert QueueDecision.objects.get().decided == before
    if change == "node":
        Node.objects.filter(pk=node.pk).update(drained=True)
    elif change == "pool":
        Pool.objects.update(max_devices_per_user=1)
    elif change == "priority":
        Run.objects.filter(pk=waiting.pk).update(priority=3)
    else:
        Attempt.objects.get(run=holder).allocations.update(released=clock.now())
    done = services.tick()
    assert QueueDecision.objects.get().decided > before
    assert [attempt.run_id for attempt in done.placed] == (
        [waiting.pk] if change == "allocation" else []
    )


def test_pages_read_the_stored_decision_and_never_run_the_policy(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.node("n1", devices=1)
    factories.run(owner)
    waiting = factories.run(owner)
    services.tick()
    monkeypatch.delattr(snapshot, "place")
    [entry] = selectors.queue_visible_to(user=owner)
    assert (entry.run.pk, entry.position) == (waiting.pk, 1) and "holds 1" in entry.reason
    seen = selectors.overview(user=owner, runs_shown=1, waiting_shown=1)
    assert seen.queue.entries[0].reason == entry.reason


def test_a_stale_decision_has_an_age(broker: Broker, owner: User) -> None:
    factories.run(owner)
    services.tick()
    assert selectors.decision_age_s() is None
    QueueDecision.objects.update(decided=clock.from_unix(clock.now().timestamp() - 100))
    assert 99 < (selectors.decision_age_s() or 0) < 130
    Lease.objects.update_or_create(
        name="scheduler", defaults={"holder": "x", "expires": clock.now(), "beat": clock.now()}
    )
    assert selectors.decision_age_s() is None and decision_store.load()


def test_the_orders_of_a_batch_share_round_trips(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [factories.node(f"n{number:02}", devices=1) for number in range(20)]
    for _ in nodes:
        factories.run(owner)
    trips = []
    whole = redis.connection.Connection.send_packed_command

    def counted(self: Any, command: Any, *args: Any, **more: Any) -> Any:
        text = b"".join(command) if isinstance(command, list) else bytes(str(command), "latin-1")
        trips.append(text.upper().count(b"LPUSH"))
        return whole(self, command, *args, **more)

    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", counted)
    assert len(services.tick().placed) == 20
    sent = [count for count in trips if count]
    assert len(sent) <= 2, "not one round trip per order"
    assert [len(broker.orders(node)) for node in nodes] == [1] * 20


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("reset by peer"),
        redis.ResponseError("MISCONF Errors writing to the AOF file"),
        BatchPublishError("delivery is uncertain"),
    ],
)
def test_a_connection_lost_while_orders_are_sent_is_no_dispatch(
    broker: Broker, owner: User, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def lost(orders: Any) -> None:
        raise error

    factories.node("n1", devices=1)
    factories.run(owner)
    monkeypatch.setattr(celery_client, "send", lost)
    [attempt] = services.tick().placed
    attempt.refresh_from_db()
    assert attempt.dispatched is None, "periodic checks repeat the order"


def test_slow_passes_decide_again_only_if_the_queue_changes(
    broker: Broker, owner: User, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ENV = settings.ENV.model_copy(update={"placements_per_tick": 1})
    factories.node("n1", devices=4)
    for _ in range(4):
        factories.run(owner)
    now = clock.now()
    taken: list[int] = []
    whole = snapshot.take
    first = services.tick(now=now)
    monkeypatch.setattr(snapshot, "take", lambda: taken.append(1) or whole())
    late = now + 3 * REST_LIFE
    second = services.tick(now=late, rest=first.rest)
    assert len(second.placed) == 1 and not taken, "only its own placements changed the queue"
    urgent = factories.run(owner)
    Run.objects.filter(pk=urgent.pk).update(priority=50)
    third = services.tick(now=late, rest=second.rest)
    assert [attempt.run_id for attempt in third.placed] == [urgent.pk] and taken == [1]


def test_the_next_pass_continues_a_decision_while_the_fleet_is_the_same(
    broker: Broker, owner: User, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ENV = settings.ENV.model_copy(update={"placements_per_tick": 1})
    node = factories.node("n1", devices=4)
    waiting = [factories.run(owner) for _ in range(4)]
    first = services.tick()
    taken: list[int] = []
    whole = snapshot.take
    monkeypatch.setattr(snapshot, "take", lambda: taken.append(1) or whole())
    Run.objects.filter(pk=waiting[1].pk).update(state="cancelled")
    second = services.tick(rest=first.rest)
    assert (second.placed, second.more, taken) == ((), True, []), "the cancelled run is skipped"
    third = services.tick(rest=second.rest)
    assert [attempt.run_id for attempt in third.placed] == [waiting[2].pk] and not taken
    Node.objects.filter(pk=node.pk).update(drained=True)
    fourth = services.tick(rest=third.rest)
    assert (fourth.placed, taken) == ((), [1]), "the fleet changed"
