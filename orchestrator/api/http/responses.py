"""JSON and streams as responses, whatever server they leave by. Knows no noun."""

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


def json_answer(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Numbers that are not finite become "NaN", "Infinity", "-Infinity"."""
    return HttpResponse(live.dumps(body), status=status, content_type=JSON, headers=headers)


def packed(request: HttpRequest, answer: HttpResponse) -> HttpResponse:
    """The answer as gzip where it is large and the asker takes it; for numbers alone, which hold
    nobody's secret.
    """
    if len(answer.content) < _LARGE or "gzip" not in request.headers.get("Accept-Encoding", ""):
        return answer
    answer.content = gzip.compress(answer.content, 3)
    answer["Content-Encoding"] = "gzip"
    patch_vary_headers(answer, ["Accept-Encoding"])
    return answer


def streamed(
    request: HttpRequest, parts: Iterator[bytes], content_type: str
) -> StreamingHttpResponse:
    """Sends part by part. The first is made at once, so that a refusal in it still is one."""
    first = next(parts, b"")
    content: Any = _async(first, parts) if isinstance(request, ASGIRequest) else _sync(first, parts)
    return StreamingHttpResponse(content, content_type=content_type)


def wants_csv(request: HttpRequest) -> bool:
    return request.get_preferred_type(["application/json", "text/csv"]) == "text/csv"


def _sync(first: bytes, parts: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from parts


async def _async(first: bytes, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """In the request's own thread, where its database connection lives."""
    yield first
    following = sync_to_async(lambda: next(parts, None))
    while (part := await following()) is not None:
        yield part
