"""Authentication, body limits, rate limits, and errors as problem details."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from jsonschema import Draft202012Validator

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.api.http import throttle
from orchestrator.common import redis
from orchestrator.common.errors import Refusal
from orchestrator.runs.models import Run
from tests import factories
from tests.conftest import FakeClock

RUNS = "/api/v1/runs"


def problem(response: Any, status: int, slug: str) -> dict[str, Any]:
    """The problem document, once its form is right."""
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/problem+json"
    body = response.json()
    assert set(body) - {"retry"} == {"type", "title", "status", "detail", "instance", "errors"}
    assert (body["type"], body["status"]) == (f"https://orrery.dev/problems/{slug}", status), body
    assert len(body["detail"].split()) >= 4, "a sentence says what, which, what next"
    assert all(set(item) == {"field", "message", "hint"} for item in body["errors"]), body["errors"]
    return body


@pytest.mark.django_db
def test_tokens_work_until_they_expire_or_are_revoked(owner: User) -> None:
    token, text = accounts.token_create(user=owner, name="laptop", by=owner)

    def send(text: str) -> Any:
        return Client(headers={"Authorization": f"Bearer {text}"}).get(RUNS)

    assert send(text).json() == {"items": [], "next_cursor": None}
    problem(send(text + "x"), 401, "token-unknown")
    problem(send("not even a token"), 401, "token-unknown")
    type(token).objects.update(expires=timezone.now() - timedelta(seconds=1))
    answer = send(text)
    assert "laptop" in problem(answer, 401, "token-expired")["detail"]
    assert answer["WWW-Authenticate"].startswith("Bearer")
    type(token).objects.update(expires=None)
    assert send(text).status_code == 200
    accounts.token_revoke(token=token, by=owner)
    assert "POST /api/v1/tokens" in problem(send(text), 401, "token-revoked")["detail"]
    problem(Client().get(RUNS), 401, "not-authenticated")
    problem(
        Client(headers={"Authorization": "Basic b3duZXI6cHc="}).get(RUNS), 401, "not-authenticated"
    )


@pytest.mark.django_db
def test_a_session_writes_with_its_csrf_token_only(owner: User) -> None:
    page = factories.client_for(owner, enforce_csrf_checks=True)
    body = json.dumps({"spec": factories.spec()})
    problem(page.post(RUNS, body, content_type="application/json"), 403, "csrf-failed")
    assert not Run.objects.exists()
    page.cookies["csrftoken"] = "a" * 32
    made = page.post(RUNS, body, content_type="application/json", headers={"X-CSRFToken": "a" * 32})
    assert made.status_code == 201, made.content
    assert page.get(RUNS).status_code == 200


@pytest.mark.django_db
def test_scopes_and_roles_bound_what_a_caller_does(owner: User, stranger: User) -> None:
    body = {"spec": factories.spec()}
    reader = factories.api(owner, scopes=["read"])
    assert reader.get(RUNS).status_code == 200
    result = problem(reader.post(RUNS, body, content_type="application/json"), 403, "scope-missing")
    assert "scope runs" in result["detail"]
    viewer = factories.api(stranger)
    result = problem(viewer.post(RUNS, body, content_type="application/json"), 403, "role-refused")
    assert "submitter" in result["detail"] and "viewer" in result["detail"]
    problem(factories.api(owner).get("/api/v1/audit"), 403, "role-refused")
    assert not Run.objects.exists()
    assert factories.api(owner).post(RUNS, body, content_type="application/json").status_code == 201


@pytest.mark.django_db
def test_unknown_paths_and_unreadable_requests(owner: User, settings: Any) -> None:
    client = factories.api(owner)
    for path in (
        "/api/",
        "/api/v1/",
        "/api/v1/nothing",
        "/api/v1/runs/abc",
        "/api/v1/runs/1/nothing",
    ):
        problem(client.get(path), 404, "not-found")
    for id in (7, 10**30):
        problem(client.get(f"{RUNS}/{id}"), 404, "not-found")
        problem(client.get(f"/api/v1/nodes/{id}"), 404, "not-found")
    assert client.head(RUNS).status_code == 200
    refused = client.delete(RUNS)
    problem(refused, 405, "method-not-allowed")
    assert set(refused["Allow"].replace(" ", "").split(",")) == {"GET", "POST"}
    for body in (b'{"spec": ', b"\xff\xfe", b'{"name": "a\x00"}'):
        problem(client.post(RUNS, body, content_type="application/json"), 400, "malformed-body")
    nested = client.post(RUNS, b"[" * 200_000, content_type="application/json")
    problem(nested, 422, "nested-too-deep")
    problem(client.get(f"{RUNS}?q=%00"), 400, "malformed-address")
    problem(client.get(f"{RUNS}?limit=201"), 422, "invalid")
    result = problem(client.get(f"{RUNS}?cursor=bm9uc2Vuc2U"), 422, "invalid")
    assert result["errors"][0]["field"] == "cursor"
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    problem(
        client.post(RUNS, b'"' + b"x" * 1001 + b'"', content_type="application/json"),
        413,
        "body-too-large",
    )
    assert not Run.objects.exists()


@pytest.mark.django_db
def test_an_internal_error_has_an_id_and_no_details(
    owner: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr("orchestrator.api.runs.selectors.run_rows", broken)
    result = problem(factories.api(owner).get(RUNS), 500, "internal-error")
    number = re.search(r"id ([0-9a-f]{12})", result["detail"])
    assert number and "secret" not in str(result)
    assert number[1] in caplog.text and "the secret inside" in caplog.text


@pytest.mark.django_db
def test_too_many_requests_wait_for_the_next_minute(
    owner: User,
    teammate: User,
    settings: Any,
    live_redis: str,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(throttle, "_redis_paused_until", 0.0)
    settings.ENV = settings.ENV.model_copy(update={"rate_per_minute": 3})
    client, other = factories.api(owner), factories.api(teammate)
    assert [client.get(RUNS).status_code for _ in range(4)] == [200, 200, 200, 429]
    answer = client.get(RUNS)
    problem(answer, 429, "too-many-requests")
    assert answer["Retry-After"] == "60"
    assert other.get(RUNS).status_code == 200, "each token has a share of its own"
    # guessing tokens spends the address's share
    guesses = [
        Client(headers={"Authorization": f"Bearer orr_{n}"}).get(RUNS).status_code for n in range(4)
    ]
    assert guesses == [401, 401, 401, 429]
    clock.advance(60)
    assert client.get(RUNS).status_code == 200


def test_a_process_takes_a_hundredth_of_a_limit_at_a_time(
    live_redis: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "_redis_paused_until", 0.0)
    calls = []
    monkeypatch.setattr(throttle, "quick_client", lambda: calls.append(1) or redis.quick_client())

    def passed(count: int) -> int:
        done = 0
        for _ in range(count):
            with contextlib.suppress(Refusal):
                throttle.check("token:shares", limit=250)
                done += 1
        return done

    assert passed(200) == 200
    assert len(calls) == 100, "one call takes two"
    monkeypatch.setattr(throttle, "_taken", {})  # another process
    assert passed(60) == 50
    clock.advance(60)
    assert passed(251) == 250


@pytest.mark.django_db
def test_requests_are_counted_while_redis_is_away(
    owner: User, settings: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ENV = settings.ENV.model_copy(update={"rate_per_minute": 2})
    settings.REDIS_URL = "unix:///nowhere/valkey.sock"
    redis.reset()
    monkeypatch.setattr(throttle, "_redis_paused_until", 0.0)
    monkeypatch.setattr(throttle, "_local", {})
    client = factories.api(owner)
    assert [client.get(RUNS).status_code for _ in range(3)] == [200, 200, 429]


def test_the_openapi_document_is_complete(client: Client) -> None:
    document = client.get("/api/v1/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        assert reference.removeprefix("#/components/schemas/") in schemas, reference
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    ids = [operation["operationId"] for _, _, operation in operations]
    assert len(ids) == len(set(ids))
    for path, method, operation in operations:
        assert operation["security"], (method, path)
        named = {item["name"] for item in operation["parameters"] if item["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path)), (method, path)
        good = [
            answer for status, answer in operation["responses"].items() if status.startswith("2")
        ]
        assert len(good) == 1 and ("content" in good[0] or "204" in operation["responses"]), (
            method,
            path,
        )
    assert schemas["Submission"]["properties"]["spec"]["$ref"] == "#/components/schemas/RunSpec"
    result = set(document["paths"])
    for path in (
        "runs",
        "runs/{id}/series",
        "nodes",
        "devices",
        "pools",
        "queue",
        "events",
        "me",
        "tokens",
        "audit",
    ):
        assert f"/api/v1/{path}" in result


def test_the_documentation_page_needs_no_other_host(client: Client) -> None:
    page = client.get("/api/docs").content.decode()
    assert "/api/v1/openapi.json" in page and "swagger-ui" in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert 'href="/">← Back to Orrery</a>' in page
