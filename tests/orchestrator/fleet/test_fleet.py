"""Nodes join by a token, send heartbeats, fall silent, return, and are drained."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.common.errors import Refusal
from orchestrator.fleet import node_health, selectors, services
from orchestrator.fleet.models import Device, JoinToken, Node
from orchestrator.scheduling.placement import snapshot
from tests import factories
from workers.contracts.wire import envelope
from workers.contracts.wire.node_messages import DeviceSample

pytestmark = pytest.mark.django_db


def join(text: str, name: str = "n1", **more: Any) -> tuple[Node, dict[str, str], bytes]:
    """What the agent and the scheduler do; the node's secret as the agent derives it."""
    request = envelope.join_request(text, name=name)
    node, reply = services.node_joined(request=request, inventory=factories.inventory(name, **more))
    result, secret = envelope.join_accept(text, request, reply)
    assert result == name
    return node, reply, secret


def test_both_sides_derive_the_same_secret_and_none_is_stored(settings: Any) -> None:
    text = services.join_token_create(by=None)
    node, _, secret = join(text, devices=2)
    assert selectors.node_secret(node) == secret
    stored = str(list(Node.objects.values())) + str(list(JoinToken.objects.values()))
    assert text.partition(".")[2] not in stored and secret.hex() not in stored
    assert [(device.index, device.kind, device.healthy) for device in node.devices.all()] == [
        (0, "cpu", True),
        (1, "cpu", True),
    ]
    settings.SECRET_KEY = "another"
    with pytest.raises(ValueError, match="ORRERY_SECRET_KEY_FALLBACKS"):
        selectors.node_secret(node)


def test_a_new_secret_key_strands_no_node(settings: Any) -> None:
    old, unused = settings.SECRET_KEY, services.join_token_create(by=None)
    node, _, secret = join(services.join_token_create(by=None), name="n1")
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new", [old]
    node.refresh_from_db()
    assert selectors.node_secret(node) == secret
    assert [sender.secret for sender in selectors.senders(["n1"])] == [secret]
    # a token of the time before still works, and a new one uses the new key
    late, _, late_secret = join(unused, name="n2")
    new, _, new_secret = join(services.join_token_create(by=None), name="n3")
    for each, expected in ((late, late_secret), (new, new_secret)):
        each.refresh_from_db()
        assert selectors.node_secret(each) == expected
    settings.SECRET_KEY_FALLBACKS = []
    assert [sender.name for sender in selectors.senders(["n1", "n2", "n3"])] == ["n3"]


def test_a_join_token_is_single_use() -> None:
    text = services.join_token_create(by=None)
    request = envelope.join_request(text, name="n1")
    inventory = factories.inventory("n1")
    first = services.node_joined(request=request, inventory=inventory)
    assert services.node_joined(request=request, inventory=inventory) == first, (
        "the same message, read twice"
    )
    for other in (envelope.join_request(text, name="n1"), envelope.join_request(text, name="n2")):
        with pytest.raises(Refusal, match="used before"):
            services.node_joined(request=other, inventory=factories.inventory(other["name"]))
    assert Node.objects.count() == 1


def test_wrong_requests_are_refused_and_create_nothing(clock: Any) -> None:
    text = services.join_token_create(by=None)
    good = envelope.join_request(text, name="n1")
    inventory = factories.inventory("n1")
    unknown = envelope.join_request(envelope.join_token_new()[1], name="n1")
    for request, given, message in (
        ({**good, "mac": "0" * 64}, inventory, "not made with this token"),
        (unknown, inventory, "not made with this token"),
        (good, factories.inventory("n2"), "from 'n1'"),
        ({"id": good["id"]}, inventory, "has id, name"),
    ):
        with pytest.raises(Refusal, match=message):
            services.node_joined(request=request, inventory=given)
    clock.advance(24 * 3600)
    with pytest.raises(Refusal, match="expired"):
        services.node_joined(request=good, inventory=inventory)
    assert not Node.objects.exists()


def test_a_node_comes_back_under_its_name_with_a_new_token() -> None:
    node, _, old = join(services.join_token_create(by=None), devices=4)
    again, _, new = join(
        services.join_token_create(by=None, pool="big"), devices=2, kind="gpu", catalogue="h100-80g"
    )
    assert (
        again.pk == node.pk
        and again.pool.name == "big"
        and old != new == selectors.node_secret(again)
    )
    devices = Device.objects.filter(node=node).order_by("index")
    assert [(device.kind, device.healthy) for device in devices] == [
        ("gpu", True),
        ("gpu", True),
        ("cpu", False),
        ("cpu", False),
    ]


def test_a_faulty_device_gets_no_work_and_states_its_reason() -> None:
    node = factories.node(devices=2)
    inventory = factories.inventory(node.name, devices=2)
    record(node, inventory=inventory)
    faulty = inventory.devices[1].model_copy(update={"problem": "XID 79: fallen off the bus."})
    broken = inventory.model_copy(update={"devices": [inventory.devices[0], faulty]})
    assert record(node, inventory=broken)
    first, second = selectors.serialize_node(Node.objects.get(pk=node.pk))["devices"]
    assert (first["healthy"], first["problem"]) == (True, None)
    assert (second["healthy"], second["problem"]) == (False, "XID 79: fallen off the bus.")
    assert [slot.index for slot in snapshot.node_views()[0].slots] == [0]
    assert record(node, inventory=inventory)
    assert Device.objects.filter(node=node, healthy=True, problem="").count() == 2


def record(node: Node, **more: Any) -> bool:
    """Record one heartbeat; True if the node was silent or lost, or its hardware changed."""
    sender = selectors.senders([node.name])[0]
    return node_health.heartbeats_record(beats=[node_health.NodeBeat(sender, time.time(), **more)])


def test_a_heartbeat_costs_few_queries_and_is_live() -> None:
    node = factories.node(devices=8)
    samples = [
        DeviceSample(index=index, utilization=0.5, memory_used_bytes=2**30) for index in range(8)
    ]
    with CaptureQueriesContext(connection) as request:
        assert not record(node, samples=json.dumps([sample.to_dict() for sample in samples]))
    assert len(request) <= 5, [query["sql"] for query in request]
    assert not [text for _, text in live.frames_after("fleet", 0) if '"samples"' in text]
    shown = selectors.serialize_node(selectors.node_get(user=factories.user("ada"), id=node.name))
    assert shown["devices"][7]["sample"] == samples[7].to_dict()


def judge(seconds: float, **more: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of nodes that become silent, lost and held if all were silent for this long."""
    changes = node_health.mark_lost_nodes(silence=lambda name: seconds, **more)
    names = [[node.name for node in nodes] for nodes in changes]
    return names[0], names[1], names[2]


def test_a_silent_node_is_unknown_then_lost_and_one_heartbeat_restores_it(settings: Any) -> None:
    node = factories.node("n1")
    silent_s, lost_s = settings.ENV.node_silent_s, settings.ENV.node_lost_s
    assert judge(silent_s - 1) == ([], [], [])
    assert judge(silent_s) == (["n1"], [], [])
    assert judge(silent_s) == ([], [], [])
    assert selectors.pools().get().device_count == 0
    assert judge(lost_s, may_lose=False) == ([], [], []), "an exit report may wait"
    assert judge(lost_s, occupied={"n1"}) == ([], [], []), "its attempts renew their leases"
    assert judge(lost_s) == ([], ["n1"], [])
    assert record(node)
    assert selectors.pools().get().device_count == 4
    result = [text for _, text in live.frames_after("fleet", 0) if '"type":"node"' in text]
    assert ['"up"' in text for text in result] == [True, False, False, True]


def test_the_loss_of_many_nodes_waits_for_an_operator(
    settings: Any, operator: User, owner: User
) -> None:
    nodes = [factories.node(f"n{number}") for number in range(10)]
    lost_s = settings.ENV.node_lost_s
    Node.objects.filter(name__in=["n0", "n1", "n2"]).update(health="silent")

    def judge_three() -> tuple[list[str], list[str]]:
        overdue = {"n0", "n1", "n2"}
        changes = node_health.mark_lost_nodes(
            silence=lambda name: lost_s if name in overdue else 0.0
        )
        return [node.name for node in changes.lost], [node.name for node in changes.held]

    assert judge_three() == ([], ["n0", "n1", "n2"]), "a fifth of ten nodes is two"
    with pytest.raises(Refusal) as refused:
        node_health.node_confirm_lost(node=nodes[0], by=owner)
    assert refused.value.status == 403
    with pytest.raises(Refusal) as refused:
        node_health.node_confirm_lost(node=nodes[5], by=operator)
    assert refused.value.status == 409
    node_health.node_confirm_lost(node=nodes[0], by=operator)
    assert judge_three() == (["n0"], ["n1", "n2"])
    record(Node.objects.get(name="n1"))
    assert not Node.objects.get(name="n1").loss_held


def test_nodes_that_are_lost_one_after_the_other_count_together(settings: Any, clock: Any) -> None:
    for number in range(5):
        factories.node(f"n{number}")
    lost_s = settings.ENV.node_lost_s
    Node.objects.filter(name__in=["n0", "n1"]).update(health="silent")

    def lost(*overdue: str) -> list[str]:
        changes = node_health.mark_lost_nodes(
            silence=lambda name: lost_s if name in overdue else 0.0
        )
        return [node.name for node in changes.lost]

    assert lost("n0") == ["n0"]
    assert lost("n1") == [], "one of five within ten minutes is a fifth"
    clock.advance(node_health.LOSS_WINDOW.total_seconds() + 1)
    assert lost("n1") == ["n1"]


def test_an_inventory_with_a_heartbeat_brings_devices_in_line() -> None:
    node = factories.node("n1", devices=2)
    assert record(node, inventory=factories.inventory("n1", devices=3))
    assert not record(node, inventory=factories.inventory("n1", devices=3))
    assert selectors.capacity() == 3


def test_draining_takes_a_node_out_and_back(operator: User, owner: User) -> None:
    node = factories.node()
    with pytest.raises(Refusal) as refused:
        services.node_drain(node=node, by=owner, reason="mine")
    assert refused.value.status == 403
    services.node_drain(node=node, by=operator, reason="fan is loud")
    shown = selectors.serialize_node(selectors.node_get(user=owner, id=str(node.pk)))
    assert (shown["drained"], shown["drain_reason"]) == (True, "fan is loud")
    assert selectors.pools().get().device_count == 0
    services.node_undrain(node=node, by=operator)
    assert selectors.pools().get().device_count == 4


def test_join_tokens_are_operators_business(owner: User, operator: User) -> None:
    with pytest.raises(Refusal):
        services.join_token_create(by=owner)
    node, _, _ = join(services.join_token_create(by=operator, pool="lab"))
    assert node.pool.name == "lab"
    with pytest.raises(Refusal):
        selectors.node_get(user=owner, id="missing")
