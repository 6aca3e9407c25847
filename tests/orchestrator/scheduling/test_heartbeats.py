"""Heartbeats that cannot be applied: ignored one by one, so they stop neither others nor a loop."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import OperationalError

from orchestrator.accounts.models import User
from orchestrator.scheduling.loop import Watched
from orchestrator.scheduling.reports import heartbeat_handler
from orchestrator.scheduling.reports.silence import NewHeartbeat
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.wire import names

pytestmark = pytest.mark.django_db


def beat(name: str, at: float, **changes: Any) -> NewHeartbeat:
    node = FakeNode(factories.Node.objects.get(name=name))
    body = {"node": name, "time": at, **changes}
    return NewHeartbeat(name, at, node.sealed(names.KIND_HEARTBEAT, body).encode())


def last(name: str) -> float:
    at = factories.Node.objects.get(name=name).last_heartbeat
    return at.timestamp() if at is not None else 0.0


def test_a_heartbeat_may_name_attempts_that_never_existed(broker: Broker) -> None:
    factories.node("n1")
    at = time.time() + 9.0
    seen = [{"fence": fence, "state": "running"} for fence in ("9223372036854775808", "x")]
    heartbeat_handler.apply([beat("n1", at, attempts=seen)])
    assert last("n1") == pytest.approx(at, rel=0, abs=0.001)


def test_one_failing_heartbeat_is_ignored_alone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("n1", "n2", "n3"):
        factories.node(name)
    record = heartbeat_handler.node_health.heartbeats_record

    def fails_for_n2(*, beats: list[Any]) -> bool:
        if any(item.node.name == "n2" for item in beats):
            raise KeyError("n2")
        return record(beats=beats)

    monkeypatch.setattr(heartbeat_handler.node_health, "heartbeats_record", fails_for_n2)
    at = time.time() + 9.0
    heartbeat_handler.apply([beat(name, at) for name in ("n1", "n2", "n3")])
    assert [last(name) == pytest.approx(at, rel=0, abs=0.001) for name in ("n1", "n2", "n3")] == [
        True,
        False,
        True,
    ]


def test_an_outage_of_the_database_is_not_a_bad_heartbeat(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.node("n1")

    def down(**_: Any) -> bool:
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(heartbeat_handler.node_health, "heartbeats_record", down)
    with pytest.raises(OperationalError):
        heartbeat_handler.apply([beat("n1", time.time())])


def test_nodes_and_fences_are_read_after_a_change_and_every_few_seconds(
    owner: User, django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    watched.refresh()
    node = factories.node("n1")
    attempt = factories.running(factories.run(owner), node)
    with django_assert_num_queries(0):
        watched.refresh()
    assert watched.nodes == []
    watched.changed()
    watched.refresh()
    assert watched.nodes == ["n1"] and watched.fences == {"n1": [str(attempt.fence)]}
    factories.node("n2")
    later = time.monotonic() + Watched.MOST_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    watched.refresh()
    assert watched.nodes == ["n1", "n2"]
