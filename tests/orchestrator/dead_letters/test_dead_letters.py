"""Dead letters by REST and on their page: limits, retry, drop, metrics."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.accounts.roles import Role
from orchestrator.common import redis as common_redis
from orchestrator.dead_letters import services
from orchestrator.dead_letters.models import DeadLetter
from tests import factories
from tests.orchestrator.api.test_middleware import problem
from workers.contracts.wire import names

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator() -> User:
    return factories.user("olga", Role.OPERATOR)


def add(message: bytes = b"message", **more: Any) -> DeadLetter:
    defaults = {"source": "telemetry", "node": "n1", "code": "failed", "reason": "<b>a fault</b>"}
    letter = services.dead_letter_add(message=message, **{**defaults, **more})
    assert letter is not None
    return letter


def test_a_message_has_one_letter_however_often_it_fails() -> None:
    first = add()
    services.dead_letter_drop(letter=first, by=factories.user("olga", Role.OPERATOR))
    again = add(reason="another")
    assert (again.pk, again.failures, again.state, again.reason) == (first.pk, 2, "open", "another")


def test_letters_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_OPEN", 2)
    add(b"1"), add(b"2")
    more = {"source": "telemetry", "node": "", "code": "failed", "reason": ""}
    assert services.dead_letter_add(message=b"3", **more) is None
    assert services.dead_letter_add(message=b"3", **{**more, "code": "malformed"}) is not None
    monkeypatch.setattr(services, "MAX_BODY_BYTES", 3)
    large = add(b"4444", code="large", reason="\x00 \ud800" + "x" * 9000)
    assert (bytes(large.body), large.size_bytes, len(large.reason)) == (b"", 4, 2000)
    assert not services.retryable(large)


def test_an_operator_lists_retries_and_drops(operator: User, live_redis: str) -> None:
    client = factories.api(operator)
    first, second = add(b"1"), add(b"2", code="malformed")
    listed = client.get("/api/v1/dead-letters").json()["items"]
    assert [item["id"] for item in listed] == [second.pk, first.pk]
    assert (listed[1]["excerpt"], listed[1]["retryable"]) == ("1", True)
    retried = client.post(f"/api/v1/dead-letters/{first.pk}/retry")
    assert retried.json()["state"] == "retried", retried.content
    entries: Any = common_redis.client().xrange(names.TELEMETRY)
    assert entries[-1][1][names.FIELD_MESSAGE.encode()] == b"1"
    problem(client.post(f"/api/v1/dead-letters/{first.pk}/retry"), 409, "already-closed")
    assert client.post(f"/api/v1/dead-letters/{second.pk}/drop").json()["state"] == "dropped"
    assert client.get("/api/v1/dead-letters").json()["items"] == []
    assert len(client.get("/api/v1/dead-letters?state=dropped").json()["items"]) == 1
    actions = AuditEntry.objects.values_list("action", flat=True)
    assert {"dead_letter.retry", "dead_letter.drop"} <= set(actions)
    job = add(b"3", source="jobs")
    problem(client.post(f"/api/v1/dead-letters/{job.pk}/retry"), 409, "not-retryable")


def test_a_retry_while_the_broker_is_down_changes_nothing(operator: User, settings: Any) -> None:
    letter = add()
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    common_redis.reset()
    answer = factories.api(operator).post(f"/api/v1/dead-letters/{letter.pk}/retry")
    problem(answer, 503, "broker-unavailable")
    letter.refresh_from_db()
    assert letter.state == "open"


def test_the_page_shows_escaped_reasons_and_closes_letters(operator: User, live_redis: str) -> None:
    client = factories.client_for(operator)
    assert "No messages" in client.get("/dead-letters/").text
    letter = add()
    page = client.get("/dead-letters/").text
    assert "1 message could not be processed" in page and "&lt;b&gt;a fault" in page
    assert "(1)" in client.get("/fleet/").text
    answer = client.post(f"/dead-letters/{letter.pk}/", {"action": "drop"}, follow=True)
    assert "The message is dropped" in answer.text
    assert "a fault" in client.get("/dead-letters/?state=dropped").text


def test_metrics_count_open_letters(owner: User, live_redis: str) -> None:
    add(), add(b"2")
    text = Client().get("/metrics").text
    assert 'orrery_dead_letters{code="failed",source="telemetry"} 2.0' in text
