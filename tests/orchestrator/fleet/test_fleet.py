"""Nodes join by a token, send heartbeats, fall silent, return, and are drained."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.common.errors import Refusal
from orchestrator.fleet import selectors, services
from orchestrator.fleet.models import Device, JoinToken, Node
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
    assert selectors.node_secret(node) != secret


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


def test_a_heartbeat_costs_few_queries_and_is_live() -> None:
    node = factories.node(devices=8)
    samples = [
        DeviceSample(index=index, utilization=0.5, memory_used_bytes=2**30) for index in range(8)
    ]
    with CaptureQueriesContext(connection) as request:
        assert not services.node_heartbeat(node=node, samples=samples)
    assert len(request) <= 8, [query["sql"] for query in request]
    _, frame = live.frames_after("fleet", 0)[-1]
    assert '"type":"sample"' in frame and f'"node":"{node.name}"' in frame
    shown = selectors.serialize_node(selectors.node_get(user=factories.user("ada"), id=node.name))
    assert shown["devices"][7]["sample"] == samples[7].to_dict()


def test_a_silent_node_is_unknown_then_lost_and_one_heartbeat_restores_it(
    clock: Any, settings: Any
) -> None:
    node = factories.node()
    started = clock.now()
    clock.advance(settings.ENV.node_silent_s)
    assert services.mark_silent(now=clock.now()) == ([], [])
    clock.advance(1)
    assert services.mark_silent(now=clock.now()).silent == [node]
    assert services.mark_silent(now=clock.now()) == ([], [])
    assert selectors.pools().get().device_count == 0
    clock.advance(settings.ENV.node_lost_s)
    recent = clock.now()
    assert services.mark_silent(now=recent, listening_since=recent).lost == [], (
        "our own absence is not the node's"
    )
    assert services.mark_silent(now=recent, listening_since=started).lost == [node]
    node.refresh_from_db()
    assert services.node_heartbeat(node=node)
    assert selectors.pools().get().device_count == 4
    result = [text for _, text in live.frames_after("fleet", 0) if '"type":"node"' in text]
    assert ['"up"' in text for text in result] == [True, False, False, True]


def test_an_inventory_with_a_heartbeat_brings_devices_in_line() -> None:
    node = factories.node("n1", devices=2)
    assert services.node_heartbeat(node=node, inventory=factories.inventory("n1", devices=3))
    assert not services.node_heartbeat(node=node, inventory=factories.inventory("n1", devices=3))
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
