"""Forwards requests to another server and its responses back, streams as they arrive.

Does not read requests or responses. A client that disconnects also closes the connection to the
other server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from workers.contracts.wire.serving_reports import CLIENT_HEADER
from workers.inference.server.http.disconnect import cancel_on_disconnect
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.schemas import server_sent_event

_CONNECT_S = 5.0
_CALL_S = 300.0  # of a call that reads files
_FORWARDED_HEADERS = ("content-type", "retry-after", "cache-control")


class Upstream:
    """The server at `url`; `headers` are sent with every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        self.url = url

    async def forward(
        self,
        request: Request,
        body: bytes,
        *,
        client: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> Response:
        """The upstream's response; `on_end` is called once it is complete.

        Raises ApiError 502 if the upstream does not answer, ClientDisconnect if the client
        disconnects before the response begins.
        """
        forwarded = self._http.build_request(
            request.method,
            request.url.path,
            params=str(request.query_params),
            content=body,
            headers={
                "content-type": request.headers.get("content-type", "application/json"),
                CLIENT_HEADER: client,
            },
        )
        try:
            send = self._http.send(forwarded, stream=True)
            response = await cancel_on_disconnect(request, send)
        except httpx.HTTPError as error:
            on_end()
            raise _no_answer(error) from None
        except BaseException:
            on_end()
            raise
        return _ForwardedResponse(response, on_end)

    async def get_json(self, path: str) -> Any:
        """Raises httpx.HTTPError, ValueError."""
        return (await self._http.get(path, timeout=3.0)).raise_for_status().json()

    async def post_json(self, path: str, body: dict[str, Any]) -> None:
        """Raises httpx.HTTPError."""
        (await self._http.post(path, json=body, timeout=3.0)).raise_for_status()

    async def call(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """POST; the response's status and text. Raises httpx.HTTPError."""
        response = await self._http.post(path, json=body, timeout=_CALL_S)
        return response.status_code, response.text

    async def get_text(self, path: str) -> str:
        """Raises httpx.HTTPError."""
        return (await self._http.get(path, timeout=3.0)).raise_for_status().text

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()


class _ForwardedResponse(StreamingResponse):
    def __init__(self, response: httpx.Response, on_end: Callable[[], None]) -> None:
        headers = {
            name: value for name, value in response.headers.items() if name in _FORWARDED_HEADERS
        }
        super().__init__(_parts(response), status_code=response.status_code, headers=headers)
        self._response, self._on_end = response, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            await self._response.aclose()


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it arrives; an event stream that breaks off gets a last event with the error."""
    try:
        async for part in response.aiter_raw():
            yield part
    except httpx.TransportError as error:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        yield b"\n\n" + server_sent_event(_no_answer(error).body)


def _no_answer(error: httpx.HTTPError) -> ApiError:
    return ApiError(f"the server behind this one does not answer: {error!r}", status=502)
