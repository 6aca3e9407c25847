"""Requests passed on to another server and its answers passed back, streams as they come.

Knows URLs; reads neither requests nor answers. A client that goes away closes the connection to the
other server too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from workers.contracts.wire.serving_reports import CLIENT_HEADER
from workers.inference.server.errors import ApiError
from workers.inference.server.gone import unless_gone
from workers.inference.server.shapes import event

_CONNECT_S = 5.0
_PASSED = ("content-type", "retry-after", "cache-control")  # of an answer's headers


class Relay:
    """To the server at `url`; `headers` go with every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        self.url = url

    async def pass_on(
        self,
        request: Request,
        body: bytes,
        *,
        client: str = "",
        ended: Callable[[], None] = lambda: None,
    ) -> Response:
        """`ended` is called once nothing more will come. Raises ApiError 502 where nobody answers,
        ClientDisconnect
        where the client goes away before the answer begins; the other server sees it go, too."""
        asked = self._http.build_request(
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
            answer = await unless_gone(request, self._http.send(asked, stream=True))
        except httpx.HTTPError as error:
            ended()
            raise _silent(error) from None
        except BaseException:
            ended()
            raise
        return _Passed(answer, ended)

    async def json(self, path: str) -> Any:
        """Raises httpx.HTTPError, ValueError."""
        return (await self._http.get(path, timeout=3.0)).raise_for_status().json()

    async def tell(self, path: str, told: dict[str, Any]) -> None:
        """Raises httpx.HTTPError."""
        (await self._http.post(path, json=told, timeout=3.0)).raise_for_status()

    async def text(self, path: str) -> str:
        """Raises httpx.HTTPError."""
        return (await self._http.get(path, timeout=3.0)).raise_for_status().text

    async def close(self) -> None:
        await self._http.aclose()


class _Passed(StreamingResponse):
    def __init__(self, answer: httpx.Response, ended: Callable[[], None]) -> None:
        headers = {name: value for name, value in answer.headers.items() if name in _PASSED}
        super().__init__(_parts(answer), status_code=answer.status_code, headers=headers)
        self._answer, self._ended = answer, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await self._answer.aclose()


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """As they come; a stream of events that breaks off says so in one more."""
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.TransportError as error:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        yield b"\n\n" + event(_silent(error).body)


def _silent(error: httpx.HTTPError) -> ApiError:
    return ApiError(f"the server behind this one does not answer: {error!r}", status=502)
