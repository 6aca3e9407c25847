"""Requests of node probes: sent to idle nodes, answered, refused, and failed without an answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet import node_probes
from orchestrator.fleet.models import Node, NodeProbe
from orchestrator.scheduling import dispatch, services
from tests import factories
from tests.node_probe_samples import node_report
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.wire import names
from workers.contracts.wire.maintenance.node_probe import NodeProbed

pytestmark = pytest.mark.django_db


def answer(node: Node, **fields: Any) -> bool:
    text = FakeNode(node).sealed(names.KIND_PROBED, NodeProbed(**fields).to_dict())
    return services.report(text)


def test_a_node_answers_a_requested_probe(broker: Broker, operator: User) -> None:
    node = factories.node("n1", devices=2)
    client = factories.api(operator)
    started = client.post("/api/v1/nodes/n1/probe", {}, content_type="application/json")
    assert started.status_code == 202, started.content
    assert started.json()["state"] == "requested"
    assert (
        client.post("/api/v1/nodes/n1/probe", {}, content_type="application/json").status_code
        == 409
    )
    [(kind, order)] = broker.orders(node)
    assert kind == names.KIND_PROBE and order["measure_s"] == 60
    assert answer(node, report=node_report())
    [item] = client.get("/api/v1/nodes/n1/probes").json()["items"]
    assert item["state"] == "done" and item["rates"][0]["unit"] == "FLOP/s"
    assert answer(node, problem="programs use 2 of 2 cores")
    [item] = client.get("/api/v1/nodes/n1/probes").json()["items"]
    assert item["state"] == "failed" and "cores" in item["message"] and item["rates"]


def test_busy_and_vanished_nodes(broker: Broker, operator: User) -> None:
    node = factories.node("n1", devices=2)
    client = factories.api(operator)
    factories.run(operator, devices=2)
    services.tick()
    refused = client.post("/api/v1/nodes/n1/probe", {}, content_type="application/json")
    assert refused.status_code == 409 and "run " in refused.json()["detail"]
    row = node_probes.request_record(node=node)
    late = clock.now() - timedelta(seconds=node_probes.PATIENCE_S + 1)
    NodeProbe.objects.filter(pk=row.pk).update(requested=late)
    [item] = client.get("/api/v1/nodes/n1/probes").json()["items"]
    assert item["state"] == "failed" and "did not answer" in item["message"]
    type(node).objects.update(wire="1.0")
    node.refresh_from_db()
    assert not dispatch.measure(node, seconds=5)
