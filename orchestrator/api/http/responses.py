"""JSON, gzip and streamed responses, under WSGI and ASGI."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.cache import patch_vary_headers

from orchestrator.common import live

JSON = "application/json; charset=utf-8"
_LARGE = 2**16


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """The body as JSON; non-finite numbers become "NaN", "Infinity" and "-Infinity"."""
    return HttpResponse(live.dumps(body), status=status, content_type=JSON, headers=headers)


def gzip_if_large(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """The response gzipped if it is large and the client accepts it.

    Only for bodies without secrets: compression would leak their length (BREACH).
    """
    if len(response.content) < _LARGE or "gzip" not in request.headers.get("Accept-Encoding", ""):
        return response
    response.content = gzip.compress(response.content, 3)
    response["Content-Encoding"] = "gzip"
    patch_vary_headers(response, ["Accept-Encoding"])
    return response


def stream_response(
    request: HttpRequest, parts: Iterator[bytes], content_type: str
) -> StreamingHttpResponse:
    """Streams the parts. Produces the first one at once, so its errors become error responses."""
    first = next(parts, b"")
    content: Any = _async(first, parts) if isinstance(request, ASGIRequest) else _sync(first, parts)
    return StreamingHttpResponse(content, content_type=content_type)


def wants_csv(request: HttpRequest) -> bool:
    """Whether the client prefers CSV to JSON."""
    return request.get_preferred_type(["application/json", "text/csv"]) == "text/csv"


def _sync(first: bytes, parts: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from parts


async def _async(first: bytes, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """In the request's own thread, which has its database connection."""
    yield first
    following = sync_to_async(lambda: next(parts, None))
    while (part := await following()) is not None:
        yield part
