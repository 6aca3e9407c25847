"""`/serve/{run}/v1`: the OpenAI client through the proxy, streaming, disconnects, authorization."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from django.db import connections
from django.test import Client

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import AuditEntry
from orchestrator.api import serve
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from tests import factories
from tests.conftest import FakeClock
from tests.orchestrator.api.fake_server import ModelServer, Thread, serves
from workers.contracts.specs.api_key_hash import key_matches

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Stage:
    url: str
    run: Run
    attempt: Attempt
    server: ModelServer
    port: int
    token: str
    people: factories.People

    def call(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        return httpx.request(method, f"{self.url}{path}", timeout=90, **options)

    def openai(self, key: str = "") -> openai.OpenAI:
        base = f"{self.url}/serve/{self.run.pk}/v1"
        return openai.OpenAI(base_url=base, api_key=key or self.token, max_retries=0, timeout=90)


@pytest.fixture
def stage(people: factories.People, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    # requests' threads end with the test
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)
    run = factories.run(
        people.owner, kind="serve", train=None, plan={}, serve={"api_key": "the run's own"}
    )
    attempt = factories.running(run, factories.node("n1"))
    _, token = accounts.token_create(user=people.owner, name="program", by=people.owner)
    server = ModelServer(attempt.fence)
    with Thread(server.app) as below, Thread(serve.application) as proxy:
        serves(run, attempt, below.port)
        yield Stage(
            f"http://127.0.0.1:{proxy.port}", run, attempt, server, below.port, token, people
        )


def test_the_openai_client_lists_completes_and_streams(stage: Stage) -> None:
    client = stage.openai()
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages: Any = [{"role": "user", "content": "count – please"}]
    assert (
        client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content
        == "one two"
    )
    assert stage.server.calls[-1]["messages"] == messages
    stage.server.go_on.release()
    stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
    # it came although no second word is written yet
    words = [next(iter(stream)).choices[0].delta.content]
    stage.server.go_on.release(2)
    words += [event.choices[0].delta.content for event in stream]
    assert words == ["one ", "two ", "three"]
    # the run's own key works as well, and cannot be read any more
    assert stage.openai("the run's own").models.list().data[0].id == "tiny"
    result = (
        factories.api(stage.people.owner)
        .get(f"/api/v1/runs/{stage.run.pk}")
        .json()["spec"]["serve"]["api_key"]
    )
    assert key_matches("the run's own", result) and "the run" not in result
    with pytest.raises(openai.AuthenticationError):
        stage.openai(result).models.list()
    assert (
        runs.run_clone(run=stage.run, by=stage.people.owner).spec["serve"]["api_key"] == result
    ), "a copy has it too"


def test_a_client_disconnect_frees_the_request(stage: Stage) -> None:
    stage.server.go_on.release()
    messages: Any = [{"role": "user", "content": "count"}]
    stream = stage.openai().chat.completions.create(model="tiny", messages=messages, stream=True)
    assert next(iter(stream)).choices[0].delta.content == "one "
    stream.close()
    assert stage.server.freed.acquire(timeout=90)
    # and one who goes before the first byte of an answer
    text = json.dumps({"model": "tiny", "messages": messages, "user": "in no hurry"})
    host, port = stage.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=90) as line:
        head = f"POST /serve/{stage.run.pk}/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Authorization: Bearer {stage.token}\r\nContent-Length: {len(text)}\r\n\r\n"
        line.sendall((head + text).encode())
        assert stage.server.waits.acquire(timeout=90)
    assert stage.server.freed.acquire(timeout=90)
    answer = stage.call(
        f"/serve/{stage.run.pk}/v1/break",
        "POST",
        headers={"Authorization": f"Bearer {stage.token}"},
    )
    assert answer.status_code == 200 and '"code": "run_broke_off"' in answer.text


def test_authorized_callers_and_refusals(stage: Stage, settings: Any) -> None:
    models = f"/serve/{stage.run.pk}/v1/models"

    def result(path: str = models, method: str = "GET", **options: Any) -> tuple[int, str | None]:
        answer = stage.call(path, method, **options)
        if answer.status_code == 200:
            return 200, None
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 30, (
            error
        )
        return answer.status_code, error["code"]

    def bearer(user: Any, **more: Any) -> dict[str, Any]:
        _, text = accounts.token_create(user=user, name="t", by=user, **more)
        return {"headers": {"Authorization": f"Bearer {text}"}}

    mine, people = {"headers": {"Authorization": f"Bearer {stage.token}"}}, stage.people
    assert result() == (401, "missing_api_key")
    assert result(headers={"Authorization": "Bearer nonsense"}) == (401, "invalid_api_key")
    assert result(**bearer(people.teammate)) == (200, None)
    assert result(**bearer(people.owner, scopes=["ingest"])) == (403, "scope_missing")
    assert (
        result(**bearer(people.stranger))
        == result("/serve/999999/v1/models", **mine)
        == (404, "run_not_found")
    )
    assert result("/serve/x/v1/models", **mine) == result(
        f"/serve/{stage.run.pk}/v1/../internal/state", **mine
    )
    assert result(f"/serve/{stage.run.pk}/internal/state", **mine) == (404, "unknown_url")
    assert result(models, "PUT", **mine) == (405, "method_not_allowed")
    other = factories.external_run(people.owner)
    assert result(f"/serve/{other.pk}/v1/models", **mine) == (404, "run_not_serving")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    chat = f"/serve/{stage.run.pk}/v1/chat/completions"
    assert result(chat, "POST", content=b"x" * 200, **mine) == (413, "body_too_large")
    assert result(chat, "POST", content=iter([b"x" * 90, b"x" * 90]), **mine) == (
        413,
        "body_too_large",
    )
    # a page: the session alone reads, writing wants the CSRF token as well
    page = Client()
    page.force_login(people.owner)
    cookies = {"sessionid": page.cookies["sessionid"].value, "csrftoken": "c" * 32}
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10**6
    body = {"json": {"messages": []}, "cookies": cookies}
    assert result(cookies=cookies) == (200, None)
    assert result(chat, "POST", **body) == (403, "csrf_failed")
    assert result(chat, "POST", **body, headers={"X-CSRFToken": "c" * 32}) == (200, None)


def test_a_server_that_refuses_the_control_planes_key_is_no_401(stage: Stage) -> None:
    """A page took it for an expired login, and a client for an unknown key of its own."""
    stage.server.key = "of another attempt"
    with pytest.raises(openai.InternalServerError) as raised:
        stage.openai().models.list()
    assert (raised.value.status_code, raised.value.code) == (502, "run_refused_key")
    assert "www-authenticate" not in raised.value.response.headers
    with pytest.raises(openai.AuthenticationError):
        stage.openai("nonsense").models.list()


def test_adapters_are_loaded_by_those_who_manage_the_run_from_paths_they_may_name(
    stage: Stage, settings: Any
) -> None:
    def call(path: str, body: Any, user: Any = None, **token: Any) -> tuple[int, str]:
        text = stage.token
        if user is not None:
            _, text = accounts.token_create(user=user, name="t", by=user, **token)
        answer = stage.call(
            f"/serve/{stage.run.pk}/v1/{path}_lora_adapter",
            "POST",
            json=body,
            headers={"Authorization": f"Bearer {text}"},
        )
        code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
        return answer.status_code, code

    people, home = stage.people, settings.ENV.home
    folder = home / "runs" / str(stage.run.pk) / "checkpoints"
    foreign = factories.run(people.owner)
    Run.objects.filter(pk=foreign.pk).update(owner=people.stranger)
    for path in (folder, home / "runs" / str(foreign.pk)):
        path.mkdir(parents=True, exist_ok=True)
    body = {"lora_name": "mine", "lora_path": f"runs/{stage.run.pk}/checkpoints"}
    assert call("load", body) == (200, "")
    assert stage.server.calls[-1] == {"lora_name": "mine", "lora_path": str(folder.resolve())}
    entry = AuditEntry.objects.order_by("-pk").first()
    assert (entry.action, entry.actor, entry.data) == (
        "run.load_adapter",
        people.owner,
        {"name": "mine"},
    )
    assert call("unload", {"lora_name": "mine"}) == (200, "")
    count = len(stage.server.calls)
    assert call("load", body, people.teammate) == (403, "forbidden")
    assert call("load", body, people.owner, scopes=["read"]) == (403, "scope_missing")
    assert call("unload", body, people.teammate)[0] == 403
    for path in ("/etc", f"runs/{foreign.pk}", "no/such", "a\0b", 3):
        assert call("load", {"lora_name": "x", "lora_path": path})[0] == 400, path
    key = {"Authorization": "Bearer the run's own"}
    url = f"/serve/{stage.run.pk}/v1/load_lora_adapter"
    assert stage.call(url, "POST", json=body, headers=key).json()["error"]["code"] == (
        "user_required"
    )
    own = {"Authorization": f"Bearer {stage.token}"}
    nested = stage.call(url, "POST", content=b"[" * 60_000, headers=own)
    assert (nested.status_code, nested.json()["error"]["code"]) == (400, "invalid_json")
    assert len(stage.server.calls) == count


def test_phases_before_and_after_serving(stage: Stage) -> None:
    def result(run: Run) -> tuple[int, str, str | None]:
        answer = stage.call(
            f"/serve/{run.pk}/v1/models", headers={"Authorization": f"Bearer {stage.token}"}
        )
        return answer.status_code, answer.json()["error"]["code"], answer.headers.get("retry-after")

    owner = stage.people.owner
    waiting = factories.run(owner, kind="serve", train=None, plan={})
    assert result(waiting) == (503, "run_not_ready", "5")
    loading = factories.running(waiting, factories.node("n2"))
    waiting.refresh_from_db()
    assert result(waiting) == (503, "run_not_ready", "2")
    serves(waiting, loading, 1)  # no server listens on that port
    assert result(waiting) == (503, "run_not_answering", "2")
    runs.event_record(run=stage.run, type="draining", data={}, attempt=1, rank=0)
    assert result(stage.run) == (503, "run_draining", "2")
    runs.run_cancel(run=waiting, by=owner)
    assert result(waiting) == (503, "run_draining", "2")
    queued = factories.run(owner, kind="serve", train=None, plan={})
    runs.run_cancel(run=queued, by=owner)
    assert result(queued) == (409, "run_ended", None)


def test_more_calls_than_allowed(clock: FakeClock, stage: Stage, settings: Any) -> None:
    """All within one minute, as the clock stands."""
    settings.ENV = settings.ENV.model_copy(update={"serve_per_minute": 3})
    answers = [
        stage.call(
            f"/serve/{stage.run.pk}/v1/models", headers={"Authorization": f"Bearer {stage.token}"}
        )
        for _ in range(5)
    ]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert (
        answers[-1].json()["error"]["type"] == "rate_limit_error"
        and int(answers[-1].headers["retry-after"]) > 0
    )
