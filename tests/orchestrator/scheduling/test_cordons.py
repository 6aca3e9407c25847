"""Cordons after failures in a row, by operators, and retries that avoid the failed node."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs.models import Delivery
from orchestrator.background_jobs.notifications import collect, subscriptions
from orchestrator.common.errors import Refusal
from orchestrator.config.env.variables import Env
from orchestrator.fleet import cordoning, cordons, selectors
from orchestrator.fleet.models import Cordon, Node
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.scheduling import services
from orchestrator.scheduling.placement import snapshot
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode

pytestmark = pytest.mark.django_db

NO_RETRIES = {"infrastructure": 0, "hang": 0, "lost": 0}


@pytest.fixture
def nodes() -> list[Node]:
    return [factories.node(f"n{number}", devices=2) for number in (1, 2, 3)]


def fail(owner: User, node: Node, *, run: Run | None = None, how: str = "infrastructure") -> Run:
    """An attempt of a run that ends on the node."""
    run = run or factories.run(owner, retries=NO_RETRIES)
    attempt = factories.running(run, node)
    FakeNode(node).exited(attempt, how, reason=f"NCCL error of run {run.pk}")
    run.refresh_from_db()
    return run


def cordon_of(node: Node) -> Cordon | None:
    return cordons.open_cordons(node=node).first()


def test_failures_in_a_row_cordon_a_node(
    broker: Broker, owner: User, operator: User, nodes: list[Node]
) -> None:
    subscriptions.subscription_create(
        by=operator,
        name="hook",
        channel="webhook",
        target="https://example.com/hook",
        events=["node_cordoned"],
    )
    collect.collect()
    fail(owner, nodes[0])
    fail(owner, nodes[0], how="ok")  # the row begins again
    fail(owner, nodes[0])
    fail(owner, nodes[0], how="lost")
    assert cordon_of(nodes[0]) is None
    last = fail(owner, nodes[0])
    cordon = cordon_of(nodes[0])
    assert cordon is not None and cordon.cause == "failures" and cordon.data["failures"] == 3
    assert f"NCCL error of run {last.pk}" in cordon.reason
    event = RunEvent.objects.get(run=last, type="node_cordoned")
    assert event.data["node"] == "n1" and event.data["reason"] == cordon.reason
    assert {view.name: view.unusable_reason for view in snapshot.node_views()} == {
        "n1": "cordoned",
        "n2": "",
        "n3": "",
    }
    collect.collect()
    assert "Node n1 is cordoned. 3 infra" in Delivery.objects.get().body["text"]
    shown = factories.client_for(operator).get("/fleet/n1/").content.decode()
    assert "3 infrastructure failures in a row" in shown and "Uncordon" in shown
    assert "n1 is cordoned" in factories.client_for(owner).get("/fleet/").content.decode()
    cordoning.node_uncordon(node=nodes[0], by=operator)
    fail(owner, nodes[0])  # those before do not count again
    assert cordon_of(nodes[0]) is None


def test_a_failing_program_cordons_no_node(broker: Broker, owner: User, nodes: list[Node]) -> None:
    retries = {"infrastructure": 20}
    run = factories.run(owner, retries=retries)
    for number in range(8):
        Run.objects.filter(pk=run.pk).update(not_before=None)
        run.refresh_from_db()
        fail(owner, nodes[number % 2], run=run)
    assert not Cordon.objects.exists()


def test_at_most_a_share_of_the_fleet_is_cordoned_automatically(
    broker: Broker, owner: User, nodes: list[Node]
) -> None:
    for node in nodes:
        for _ in range(3):
            fail(owner, node)
    assert [cordon.node.name for cordon in Cordon.objects.all()] == ["n1"]
    Node.objects.exclude(pk=nodes[2].pk).update(drained=True)
    Cordon.objects.all().delete()
    fail(owner, nodes[2])
    assert cordon_of(nodes[2]) is None  # the last usable one of its pool


def test_a_setting_of_zero_cordons_nothing(
    broker: Broker, owner: User, nodes: list[Node], settings: Any
) -> None:
    settings.ENV = Env(cordon_failures=0)
    for _ in range(4):
        fail(owner, nodes[0])
    assert not Cordon.objects.exists()


def test_an_operator_cordons_a_device_while_the_rest_works(
    broker: Broker, owner: User, operator: User, nodes: list[Node]
) -> None:
    api = factories.api(operator)
    body = {"device": 1, "reason": "loose cable"}

    def post(action: str, data: dict[str, Any]) -> Any:
        return api.post(f"/api/v1/nodes/n1/{action}", data, "application/json")

    shown = post("cordon", body).json()
    assert [(item["device"], item["reason"]) for item in shown["cordons"]] == [(1, "loose cable")]
    assert post("cordon", body).status_code == 409
    assert post("cordon", {"device": 7}).status_code == 404
    assert [len(view.slots) for view in snapshot.node_views()] == [1, 2, 2]
    assert selectors.capacity() == 5 and selectors.pools()[0].device_count == 5
    run = factories.run(owner, devices=2)
    services.tick()
    assert Attempt.objects.get(run=run).placement[0]["node"] != "n1"
    metrics = factories.api(operator).get("/metrics").content.decode()
    assert 'orrery_cordons{of="device"} 1.0' in metrics
    assert post("uncordon", {"device": 1}).json()["cordons"] == []
    assert post("uncordon", {}).status_code == 409
    history = api.get("/api/v1/nodes/n1/cordons").json()["items"]
    assert history[0]["lifted_by"] == operator.username
    with pytest.raises(Refusal, match="operator"):
        cordoning.node_cordon(node=nodes[0], by=owner)


def test_lifting_a_cordon_starts_a_waiting_run(broker: Broker, owner: User, operator: User) -> None:
    node = factories.node("only", devices=1)
    page = factories.client_for(operator)
    assert page.post("/fleet/only/cordon/", {"device": "", "reason": "fan"}).status_code == 302
    run = factories.run(owner)
    assert not services.tick().placed
    assert "only is cordoned" in Run.objects.get(pk=run.pk).wait_reason
    assert not services.tick().placed
    assert page.post("/fleet/only/uncordon/", {"device": ""}).status_code == 302
    assert len(services.tick().placed) == 1
    assert page.post("/fleet/only/cordon/", {"device": "x"}).status_code == 422
    assert not cordons.open_of(node)


def test_a_retry_avoids_the_node_of_the_failure(broker: Broker, owner: User, clock: Any) -> None:
    factories.node("b", devices=1)
    factories.run(owner)
    assert len(services.tick().placed) == 1
    first = factories.node("a", devices=1)
    run = factories.run(owner, retries={"infrastructure": 5})
    FakeNode(first).exited(factories.running(run, first), "infrastructure", reason="NCCL error")
    clock.advance(5)
    assert not services.tick().placed  # b is busy, and a failed
    waits = Run.objects.get(pk=run.pk).wait_reason
    assert "its last attempt failed on a, which it avoids until 00:10:00 UTC" in waits
    clock.advance(600)
    placed = services.tick().placed
    assert [attempt.placement[0]["node"] for attempt in placed] == ["a"]


def test_a_retry_uses_the_failed_node_if_no_other_can_host_it(
    broker: Broker, owner: User, clock: Any
) -> None:
    large = factories.node("a", devices=2)
    factories.node("b", devices=1)
    factories.node("c", devices=2, pool="other")
    run = factories.run(owner, devices=2, retries={"infrastructure": 5})
    FakeNode(large).exited(factories.running(run, large), "infrastructure", reason="NCCL error")
    clock.advance(5)
    assert [attempt.placement[0]["node"] for attempt in services.tick().placed] == ["a"]
