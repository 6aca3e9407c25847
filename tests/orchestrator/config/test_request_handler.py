"""Requests of a web process: a fixed number of threads, also for streams and lost clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import override_settings
from django.urls import path

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


urlpatterns = [path("waiting/", waiting), path("stream/", stream), path("broken/", broken)]


class Call:
    """One request; `parts` are the chunks that were sent."""

    def __init__(self, handler: RequestHandler, where: str) -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.gone = asyncio.Event()
        self._requested = False
        self._messages = 0
        scope = {"type": "http", "method": "GET", "path": where, "headers": [], "query_string": b""}
        self.task = asyncio.create_task(handler(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._requested:
            self._requested = True
            return {"type": "http.request", "body": b""}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.parts.append(message.get("body", b""))
        if len(self.parts) > 4:
            self.gone.set()
        await asyncio.sleep(0)


def handler() -> Iterator[RequestHandler]:
    with override_settings(
        ROOT_URLCONF=__name__, MIDDLEWARE=[], WEB_THREADS=2, DEBUG_PROPAGATE_EXCEPTIONS=False
    ):
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
