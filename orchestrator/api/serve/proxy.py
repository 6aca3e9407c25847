"""Reverse proxy from `/serve/{run}/v1/…` to the run's server.

Bodies stream in both directions without buffering, so each SSE event is sent at once. When the
client disconnects, the call to the server ends, which frees the request's blocks.
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

from orchestrator.api.serve import adapters
from orchestrator.api.serve.callers import authorize
from orchestrator.api.serve.errors import (
    ApiError,
    Header,
    Receive,
    Scope,
    Send,
    send_error,
    send_start,
)
from orchestrator.runs.outputs.endpoint import EndpointStatus
from workers.contracts.wire.serving_reports import CLIENT_HEADER

log = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(r"/serve/([0-9]{1,19})/v1(/.*)?$")
_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
# hop-by-hop headers (RFC 9110, 7.6.1), and those between the caller and Orrery only
_NOT_FORWARDED: Final = frozenset(
    (
        b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade host "
        b"authorization cookie x-csrftoken x-orrery-key x-orrery-client content-length expect "
        b"forwarded x-forwarded-for"
    ).split()
)
_NOT_RETURNED: Final = frozenset(
    (
        b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade set-cookie "
        b"server date"
    ).split()
)
# no read timeout: the first byte may wait for a queue and a long prompt; the server has its own
# limit
_TIMEOUT: Final = httpx.Timeout(None, connect=5.0, write=60.0)
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
    weakref.WeakKeyDictionary()
)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of `http` scopes below `/serve/`, and of `lifespan`."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    try:
        run_id, path = _address(scope)
        endpoint_status, caller = await database_sync_to_async(authorize, thread_sensitive=False)(
            scope, run_id, token_scope="runs" if path in adapters.PATHS else "read"
        )
        if path in adapters.PATHS:
            receive = await adapters.checked(scope, receive, path, caller)
        with _limit_streams():
            await _proxy(scope, receive, send, endpoint_status, path, caller.name)
    except ApiError as error:
        await send_error(send, error)


def _address(scope: Scope) -> tuple[int, str]:
    match = _ADDRESS.fullmatch(scope["path"])
    if match is None or ".." in scope["path"].split("/"):
        message = (
            f"No operation has the path {scope['path']}. Use the base URL /serve/RUN/v1 "
            "with a run id."
        )
        raise ApiError(404, "unknown_url", message)
    if scope["method"] not in _METHODS:
        raise ApiError(
            405,
            "method_not_allowed",
            f"{scope['method']} is not allowed; use {', '.join(_METHODS)}.",
        )
    return int(match[1]), f"/v1{match[2] or ''}"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await _client().aclose()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


_open_streams = 0


@contextlib.contextmanager
def _limit_streams() -> Iterator[None]:
    """Limit concurrent responses per process, so one model cannot use up the pages' memory."""
    global _open_streams
    limit = int(settings.ENV.serve_streams)
    if limit and _open_streams >= limit:
        message = f"This web process already proxies {limit} responses. Try again in 2 s."
        raise ApiError(503, "too_many_streams", message, retry_after_s=2)
    _open_streams += 1
    try:
        yield
    finally:
        _open_streams -= 1


async def _proxy(
    scope: Scope,
    receive: Receive,
    send: Send,
    endpoint_status: EndpointStatus,
    path: str,
    caller: str,
) -> None:
    body = _Body(scope, receive)
    query = scope["query_string"].decode("latin-1")
    url = (
        endpoint_status.url
        + quote(path, safe="/:@!$&'()*+,;=~-._")
        + (f"?{query}" if query else "")
    )
    headers = [
        (name, value) for name, value in scope["headers"] if name.lower() not in _NOT_FORWARDED
    ]
    headers += [
        (name.encode(), value.encode())
        for name, value in {**endpoint_status.headers, CLIENT_HEADER: caller}.items()
    ]
    if body.length is not None:
        headers.append((b"content-length", str(body.length).encode()))
    has_body = scope["method"] == "POST"
    request = _client().build_request(
        scope["method"], url, headers=headers, content=body.parts() if has_body else None
    )
    forwarding = asyncio.create_task(_forward(request, send))
    disconnect = asyncio.create_task(body.wait_for_disconnect(read_first=not has_body))
    try:
        await asyncio.wait({forwarding, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        if not forwarding.done():
            forwarding.cancel()
        for task in (forwarding, disconnect):
            with contextlib.suppress(asyncio.CancelledError, _Disconnected):
                await task


async def _forward(request: httpx.Request, send: Send) -> None:
    """Forward the call and return the response. Cancelling closes the connection to the server."""
    try:
        answer = await _client().send(request, stream=True)
    except httpx.TransportError as error:
        message = (
            "The run's server does not answer; it may be starting or stopping. Check the run's "
            "page, "
            "and try again in 2 s."
        )
        raise ApiError(503, "run_not_answering", message, retry_after_s=2) from error
    try:
        if answer.status_code == 401:  # the caller is known; pages take a 401 as an expired login
            message = (
                "The run's server refused the control plane's key; it may have restarted. Check "
                "the run's page, and try again."
            )
            raise ApiError(502, "run_refused_key", message)
        headers: list[Header] = [
            (n.lower(), v) for n, v in answer.headers.raw if n.lower() not in _NOT_RETURNED
        ]
        streams = answer.headers.get("content-type", "").startswith("text/event-stream")
        if streams:
            headers.append((b"x-accel-buffering", b"no"))  # nginx in front must not collect events
        await send_start(send, answer.status_code, headers)
        try:
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError as error:
            if not streams:
                raise  # the client sees a truncated response
            log.warning("the server of %s disconnected: %s", request.url.path, error)
            broken = ApiError(
                502,
                "run_broke_off",
                "The run's server ended during its response. Repeat the request.",
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


class _Disconnected(Exception):
    """The client disconnected."""


class _Body:
    """The request body in chunks, up to ORRERY_MAX_BODY_MB, and the client's disconnect."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive, self._read = receive, asyncio.Event()
        self._limit = int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
        announced = next(
            (value for name, value in scope["headers"] if name.lower() == b"content-length"), b""
        )
        self.length = int(announced) if announced.isdigit() else None
        if self.length is not None and self.length > self._limit:
            raise self._too_large()

    async def parts(self) -> AsyncIterator[bytes]:
        """The chunks of the body. Raises ApiError 413 above the limit."""
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > self._limit:
                raise self._too_large()
            if part:
                yield part
        self._read.set()

    async def wait_for_disconnect(self, *, read_first: bool) -> None:
        """Return when the client disconnects."""
        if not read_first:
            await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _too_large(self) -> ApiError:
        message = (
            f"The body is larger than {self._limit / 1e6:g} MB. Send less; ORRERY_MAX_BODY_MB "
            "sets the limit."
        )
        return ApiError(413, "body_too_large", message)


def _client() -> httpx.AsyncClient:
    """One client per event loop, with persistent connections to servers."""
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None or client.is_closed:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0
        )
        client = _clients[loop] = httpx.AsyncClient(
            timeout=_TIMEOUT, limits=limits, trust_env=False
        )
    return client
