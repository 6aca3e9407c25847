"""Carries calls of `/serve/{run}/v1/…` to the run's server and its answers back, piece by piece as
they come.

Bodies stream both ways and nothing is kept: an event of an SSE stream leaves when it comes. When
the client goes away,
the call to the server ends, which frees the request's blocks. Who may call is `callers`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Final
from urllib.parse import quote

import httpx
from channels.db import database_sync_to_async
from django.conf import settings

from orchestrator.api.serve.callers import admitted
from orchestrator.api.serve.errors import Header, Receive, Refused, Scope, Send, start, tell
from orchestrator.runs.outputs.endpoint import Standing
from workers.contracts.wire.serving_reports import CLIENT_HEADER

log = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(r"/serve/([0-9]{1,19})/v1(/.*)?$")
_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
# hop by hop (RFC 9110, 7.6.1), and what is between the caller and Orrery alone
_KEPT_BACK: Final = frozenset(
    b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade host "
    b"authorization cookie"
    b" x-csrftoken x-orrery-key x-orrery-client content-length expect forwarded x-forwarded-for".split()
)
_NOT_RETURNED: Final = frozenset(
    (
        b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade set-cookie "
        b"server date"
    ).split()
)
# an answer's first byte may wait for a queue and a long prompt: the server, which knows, ends what
# takes too long
_PATIENCE: Final = httpx.Timeout(None, connect=5.0, write=60.0)
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
    weakref.WeakKeyDictionary()
)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for `http` scopes below `/serve/`, and for `lifespan`, whose end lets
    connections go.
    """
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    try:
        run_id, path = _address(scope)
        where, caller = await database_sync_to_async(admitted, thread_sensitive=False)(
            scope, run_id
        )
        with _counted():
            await _carry(scope, receive, send, where, path, caller)
    except Refused as refused:
        await tell(send, refused)


def _address(scope: Scope) -> tuple[int, str]:
    found = _ADDRESS.fullmatch(scope["path"])
    if found is None or ".." in scope["path"].split("/"):
        message = (
            f"Nothing answers at {scope['path']}. Give a client the base URL /serve/RUN/v1, "
            "RUN being a number."
        )
        raise Refused(404, "unknown_url", message)
    if scope["method"] not in _METHODS:
        raise Refused(
            405,
            "method_not_allowed",
            f"{scope['method']} is not taken here; use {', '.join(_METHODS)}.",
        )
    return int(found[1]), f"/v1{found[2] or ''}"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await _client().aclose()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


_on_their_way = 0


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Answers on their way through this process have a bound, so that one model cannot take the
    pages' memory.
    """
    global _on_their_way
    most = int(settings.ENV.serve_streams)
    if most and _on_their_way >= most:
        message = (
            f"{most} answers are on their way through this web process already. Try again in a "
            "moment."
        )
        raise Refused(503, "too_many_streams", message, retry_after_s=2)
    _on_their_way += 1
    try:
        yield
    finally:
        _on_their_way -= 1


async def _carry(
    scope: Scope, receive: Receive, send: Send, where: Standing, path: str, caller: str
) -> None:
    body = _Body(scope, receive)
    query = scope["query_string"].decode("latin-1")
    url = where.url + quote(path, safe="/:@!$&'()*+,;=~-._") + (f"?{query}" if query else "")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _KEPT_BACK]
    headers += [
        (name.encode(), value.encode())
        for name, value in {**where.headers, CLIENT_HEADER: caller}.items()
    ]
    if body.length is not None:
        headers.append((b"content-length", str(body.length).encode()))
    has_body = scope["method"] == "POST"
    request = _client().build_request(
        scope["method"], url, headers=headers, content=body.parts() if has_body else None
    )
    forwarding = asyncio.create_task(_forward(request, send))
    gone = asyncio.create_task(body.until_gone(read_first=not has_body))
    try:
        await asyncio.wait({forwarding, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not forwarding.done():
            forwarding.cancel()
        for task in (forwarding, gone):
            with contextlib.suppress(asyncio.CancelledError, _Gone):
                await task


async def _forward(request: httpx.Request, send: Send) -> None:
    """Sends the call on and its answer back. Cancelling closes the connection to the server."""
    try:
        answer = await _client().send(request, stream=True)
    except httpx.TransportError as error:
        message = (
            "The run's server does not answer; it may be starting or ending. Its page tells; "
            "try again in a moment."
        )
        raise Refused(503, "run_not_answering", message, retry_after_s=2) from error
    try:
        headers: list[Header] = [
            (n.lower(), v) for n, v in answer.headers.raw if n.lower() not in _NOT_RETURNED
        ]
        streams = answer.headers.get("content-type", "").startswith("text/event-stream")
        if streams:
            headers.append((b"x-accel-buffering", b"no"))  # nginx in front must not collect events
        await start(send, answer.status_code, headers)
        try:
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError as error:
            if not streams:
                raise  # the client sees its answer cut short, as it is
            log.warning("the server of %s broke off: %s", request.url.path, error)
            broken = Refused(
                502,
                "run_broke_off",
                "The run's server ended in the middle of its answer. Ask again.",
            )
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + broken.body + b"\n\n",
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b""})
    finally:
        await answer.aclose()


class _Gone(Exception):
    """The client went away."""


class _Body:
    """The caller's body, part by part, within ORRERY_MAX_BODY_MB; and after it the news that the
    caller is gone.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive, self._read = receive, asyncio.Event()
        self._most = int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
        told = next(
            (value for name, value in scope["headers"] if name.lower() == b"content-length"), b""
        )
        self.length = int(told) if told.isdigit() else None
        if self.length is not None and self.length > self._most:
            raise self._too_large()

    async def parts(self) -> AsyncIterator[bytes]:
        taken, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            part, more = message.get("body", b""), message.get("more_body", False)
            taken += len(part)
            if taken > self._most:
                raise self._too_large()
            if part:
                yield part
        self._read.set()

    async def until_gone(self, *, read_first: bool) -> None:
        """Returns when the caller has gone, however long that takes."""
        if not read_first:
            await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _too_large(self) -> Refused:
        message = (
            f"The body is larger than {self._most / 1e6:g} MB. Send less; ORRERY_MAX_BODY_MB "
            "sets the limit."
        )
        return Refused(413, "body_too_large", message)


def _client() -> httpx.AsyncClient:
    """One a process's loop: connections to servers are kept and used again."""
    loop = asyncio.get_running_loop()
    found = _clients.get(loop)
    if found is None or found.is_closed:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0
        )
        found = _clients[loop] = httpx.AsyncClient(
            timeout=_PATIENCE, limits=limits, trust_env=False
        )
    return found
