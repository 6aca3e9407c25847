"""Removing a node: refused while attempts are on it; its secret is void afterwards."""

from __future__ import annotations

import pytest

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Device, Node
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.reports.handler import dropped
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from tests.orchestrator.scheduling.test_reports import placed
from workers.contracts.wire import envelope

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("by_page", [False, True])
def test_a_node_is_removed_when_no_attempt_is_on_it(
    broker: Broker, owner: User, operator: User, by_page: bool
) -> None:
    node, attempt = FakeNode(factories.node("n1")), placed(owner)
    factories.node("n2")

    def remove(user: User) -> int:
        if by_page:
            return factories.client_for(user).post("/fleet/n1/remove/").status_code
        return factories.api(user).delete("/api/v1/nodes/n1").status_code

    assert remove(owner) == 403
    assert remove(operator) == 409
    assert Node.objects.filter(name="n1").exists()
    Attempt.objects.filter(pk=attempt.pk).update(state="exited")
    attempt.shares.update(state="exited")
    assert remove(operator) == (302 if by_page else 204)
    assert list(Node.objects.values_list("name", flat=True)) == ["n2"]
    assert set(Device.objects.values_list("node__name", flat=True)) == {"n2"}
    assert AuditEntry.objects.get(action="node.remove").target == "node:n1"
    before = dropped["unknown"]
    node.send_report(attempt, "event", type="late", data={})
    assert dropped["unknown"] == before + 1
    assert remove(operator) == 404


def test_a_removed_node_returns_with_a_new_token_only(operator: User) -> None:
    text = fleet.join_token_create(by=None)
    request = envelope.join_request(text, name="n1")
    inventory = factories.inventory("n1")
    node = fleet.node_joined(request=request, inventory=inventory)[0]
    fleet.node_remove(node=node, by=operator)
    with pytest.raises(Exception, match="used before"):
        fleet.node_joined(request=request, inventory=inventory)
    again = envelope.join_request(fleet.join_token_create(by=None), name="n1")
    assert fleet.node_joined(request=again, inventory=inventory)[0].name == "n1"
