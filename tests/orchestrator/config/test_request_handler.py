"""Requests of a web process: threads, streams, lost clients, and refusals while it is busy."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import override_settings
from django.urls import path

from orchestrator.config import overload
from orchestrator.config.request_handler import RequestHandler

_begun: list[int] = []
_gate = threading.Event()


def waiting(request: HttpRequest) -> HttpResponse:
    """Answers once the gate is open."""
    _begun.append(threading.get_ident())
    assert _gate.wait(30)
    return HttpResponse()


def stream(request: HttpRequest) -> StreamingHttpResponse:
    """Sends the number of each part's thread."""

    async def parts() -> Any:
        yield first
        while True:
            yield await sync_to_async(lambda: f"{threading.get_ident()},")()

    first = f"{threading.get_ident()},"
    return StreamingHttpResponse(parts())


def broken(request: HttpRequest) -> HttpResponse:
    """Fails."""
    raise RuntimeError("broken")


def quick(request: HttpRequest) -> HttpResponse:
    """Answers at once."""
    return HttpResponse()


urlpatterns = [
    path("waiting/", waiting),
    path("stream/", stream),
    path("broken/", broken),
    path("health/", quick),
    path("metrics", waiting),
    path("static/base.css", quick),
    path("api/v1/runs/3/cancel", quick),
    *(path(f"api/v1/runs/3/{name}", quick) for name in ("pause", "resume", "retry")),
    path("runs/3/act/", quick),
]


class Call:
    """One request; `parts` are the chunks that were sent."""

    def __init__(self, handler: RequestHandler, where: str, method: str = "GET") -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.gone = asyncio.Event()
        self._requested = False
        self._messages = 0
        scope = {"type": "http", "method": method, "path": where}
        scope |= {"headers": [], "query_string": b""}
        self.task = asyncio.create_task(handler(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._requested:
            self._requested = True
            return {"type": "http.request", "body": b""}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.headers.update(message.get("headers", []))
        self.parts.append(message.get("body", b""))
        if len(self.parts) > 4:
            self.gone.set()
        await asyncio.sleep(0)


def handler(**more: Any) -> Iterator[RequestHandler]:
    fixed = {"ROOT_URLCONF": __name__, "MIDDLEWARE": [], "DEBUG_PROPAGATE_EXCEPTIONS": False}
    with override_settings(WEB_THREADS=2, **fixed, **more):
        yield RequestHandler()


def test_requests_wait_for_a_thread_and_answer_all() -> None:
    async def run(app: RequestHandler) -> list[Call]:
        calls = [Call(app, "/waiting/") for _ in range(20)]
        while len(_begun) < 2:
            await asyncio.sleep(0.01)
        calls[0].task.cancel()  # its thread is used again only once the view has returned
        await asyncio.sleep(0.05)
        assert len(_begun) == 2
        _gate.set()
        await asyncio.wait([call.task for call in calls])
        return calls

    _begun.clear()
    _gate.clear()
    for app in handler():
        calls = asyncio.run(run(app))
    assert [call.status for call in calls[1:]] == [200] * 19
    assert len(set(_begun)) == 2


def test_a_stream_keeps_its_thread_until_the_client_disconnects(caplog: Any) -> None:
    async def run(app: RequestHandler) -> tuple[Call, Call, Call]:
        _gate.set()
        first = Call(app, "/stream/")
        await asyncio.wait_for(first.task, 30)
        second, failed = Call(app, "/waiting/"), Call(app, "/broken/")
        await asyncio.wait([second.task, failed.task])
        return first, second, failed

    for app in handler():
        first, second, failed = asyncio.run(run(app))
    used = set(b"".join(first.parts).decode().strip(",").split(","))
    assert len(used) == 1, "the parts share the thread, and so its database connection"
    assert (first.status, second.status, failed.status) == (200, 200, 500)


def test_a_busy_process_refuses_early_but_not_health_and_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(overload, "_COUNT_S", 0.0)
    monkeypatch.setattr("orchestrator.api.http.overload.add_refused", counted.append)

    async def run(app: RequestHandler) -> tuple[list[Call], list[Call], list[Call]]:
        accepted = [Call(app, "/waiting/") for _ in range(5)]  # two threads and a queue of three
        while len(_begun) < 2:
            await asyncio.sleep(0.01)
        refused = [Call(app, "/api/v1/runs"), Call(app, "/runs/")]
        exempt = [Call(app, "/health/"), Call(app, "/api/v1/runs/3/cancel", "POST")]
        exempt.append(Call(app, "/runs/3/act/", "POST"))
        await asyncio.wait([call.task for call in refused + exempt])
        style = Call(app, "/static/base.css")  # waits
        await asyncio.sleep(0.05)
        assert not style.task.done()
        _gate.set()
        await asyncio.wait([call.task for call in [*accepted, style]])
        while not counted:
            await asyncio.sleep(0.01)
        return [*accepted, style], refused, exempt

    _begun.clear()
    _gate.clear()
    for app in handler(WEB_QUEUE=3):
        accepted, refused, exempt = asyncio.run(run(app))
    assert {call.status for call in accepted + exempt} == {200}
    assert [call.status for call in refused] == [503, 503]
    assert {call.headers[b"Retry-After"] for call in refused} == {b"2"}
    for call in refused:
        assert int(call.headers[b"Content-Length"]) == len(b"".join(call.parts))
    problem = json.loads(b"".join(refused[0].parts))
    assert problem["type"].endswith("/overloaded") and problem["retry"] is True
    assert problem["instance"] == "/api/v1/runs"
    assert b"The server is busy" in b"".join(refused[1].parts)
    assert sum(counted) == 2


def test_requests_that_are_never_refused_wait_without_limit() -> None:
    """And metrics, which may be slow, delay neither health checks nor actions on runs."""

    async def run(app: RequestHandler) -> tuple[list[Call], list[Call]]:
        waits = [Call(app, "/waiting/") for _ in range(2)]
        waits += [Call(app, "/metrics") for _ in range(4)]
        while len(_begun) < 3:
            await asyncio.sleep(0.01)
        waits.append(Call(app, "/static/base.css"))
        actions = ("cancel", "pause", "resume", "retry")
        prompt = [Call(app, f"/api/v1/runs/3/{name}", "POST") for name in actions]
        prompt.append(Call(app, "/health/"))
        await asyncio.wait([call.task for call in prompt], timeout=10)
        await asyncio.sleep(0.2)
        _gate.set()
        await asyncio.wait([call.task for call in waits])
        return waits, prompt

    _begun.clear()
    _gate.clear()
    for app in handler(WEB_QUEUE=1, WEB_WAIT_S=0.05):
        waits, prompt = asyncio.run(run(app))
    assert [call.status for call in prompt] == [200] * 5
    assert [call.status for call in waits] == [200] * 7


def test_a_request_waits_for_a_thread_for_a_limited_time() -> None:
    async def run(app: RequestHandler) -> tuple[list[Call], Call]:
        running = [Call(app, "/waiting/") for _ in range(2)]
        late = Call(app, "/waiting/")
        await late.task
        _gate.set()
        await asyncio.wait([call.task for call in running])
        return running, late

    _gate.clear()
    for app in handler(WEB_WAIT_S=0.05):
        running, late = asyncio.run(run(app))
    assert [call.status for call in running] == [200, 200]
    assert late.status == 503
