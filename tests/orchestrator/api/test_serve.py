"""`/serve/{run}/v1`: the real OpenAI client through the proxy, unbuffered, cancelled when its
caller goes; who may
call, and what everybody else is told."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
from django.db import connections
from django.test import Client

from orchestrator.accounts import services as accounts
from orchestrator.api import serve
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from tests import factories
from tests.conftest import FakeClock
from tests.orchestrator.api.standin import ModelServer, Thread, serves
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


def test_the_openai_client_lists_asks_and_streams_word_by_word(stage: Stage) -> None:
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
    # the run's own key opens it as well, and nobody can read it any more
    assert stage.openai("the run's own").models.list().data[0].id == "tiny"
    told = (
        factories.api(stage.people.owner)
        .get(f"/api/v1/runs/{stage.run.pk}")
        .json()["spec"]["serve"]["api_key"]
    )
    assert key_matches("the run's own", told) and "the run" not in told
    with pytest.raises(openai.AuthenticationError):
        stage.openai(told).models.list()
    assert runs.run_clone(run=stage.run, by=stage.people.owner).spec["serve"]["api_key"] == told, (
        "a copy has it too"
    )


def test_a_caller_who_goes_frees_the_request(stage: Stage) -> None:
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


def test_who_may_call_and_what_others_are_told(stage: Stage, settings: Any) -> None:
    models = f"/serve/{stage.run.pk}/v1/models"

    def told(path: str = models, method: str = "GET", **options: Any) -> tuple[int, str | None]:
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
    assert told() == (401, "missing_api_key")
    assert told(headers={"Authorization": "Bearer nonsense"}) == (401, "invalid_api_key")
    assert told(**bearer(people.teammate)) == (200, None)
    assert told(**bearer(people.owner, scopes=["ingest"])) == (403, "scope_missing")
    assert (
        told(**bearer(people.stranger))
        == told("/serve/999999/v1/models", **mine)
        == (404, "run_not_found")
    )
    assert told("/serve/x/v1/models", **mine) == told(
        f"/serve/{stage.run.pk}/v1/../internal/state", **mine
    )
    assert told(f"/serve/{stage.run.pk}/internal/state", **mine) == (404, "unknown_url")
    assert told(models, "PUT", **mine) == (405, "method_not_allowed")
    other = factories.external_run(people.owner)
    assert told(f"/serve/{other.pk}/v1/models", **mine) == (404, "run_not_serving")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    chat = f"/serve/{stage.run.pk}/v1/chat/completions"
    assert told(chat, "POST", content=b"x" * 200, **mine) == (413, "body_too_large")
    assert told(chat, "POST", content=iter([b"x" * 90, b"x" * 90]), **mine) == (
        413,
        "body_too_large",
    )
    # a page: the session alone reads, writing wants the CSRF token as well
    page = Client()
    page.force_login(people.owner)
    cookies = {"sessionid": page.cookies["sessionid"].value, "csrftoken": "c" * 32}
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10**6
    body = {"json": {"messages": []}, "cookies": cookies}
    assert told(cookies=cookies) == (200, None)
    assert told(chat, "POST", **body) == (403, "csrf_failed")
    assert told(chat, "POST", **body, headers={"X-CSRFToken": "c" * 32}) == (200, None)


def test_what_is_told_before_and_after_it_serves(stage: Stage) -> None:
    def told(run: Run) -> tuple[int, str, str | None]:
        answer = stage.call(
            f"/serve/{run.pk}/v1/models", headers={"Authorization": f"Bearer {stage.token}"}
        )
        return answer.status_code, answer.json()["error"]["code"], answer.headers.get("retry-after")

    owner = stage.people.owner
    waiting = factories.run(owner, kind="serve", train=None, plan={})
    assert told(waiting) == (503, "run_not_ready", "5")
    loading = factories.running(waiting, factories.node("n2"))
    waiting.refresh_from_db()
    assert told(waiting) == (503, "run_not_ready", "2")
    serves(waiting, loading, 1)  # nobody listens on that port
    assert told(waiting) == (503, "run_not_answering", "2")
    runs.event_record(run=stage.run, type="draining", data={}, attempt=1, rank=0)
    assert told(stage.run) == (503, "run_draining", "2")
    runs.run_cancel(run=waiting, by=owner)
    assert told(waiting) == (503, "run_draining", "2")
    queued = factories.run(owner, kind="serve", train=None, plan={})
    runs.run_cancel(run=queued, by=owner)
    assert told(queued) == (409, "run_ended", None)


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
