"""What every call passes before its view: the size of its body, and errors that Django tells in its
own way.

Knows requests and responses; does not know routes, people or rooms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, path, re_path

from orchestrator.api.http import problems

View = Callable[..., HttpResponseBase]


def guarded(patterns: list[URLPattern | URLResolver]) -> list[URLPattern | URLResolver]:
    """The same addresses behind the door, and an answer for all others below them."""
    found: list[URLPattern | URLResolver] = []
    for pattern in patterns:
        if isinstance(pattern, URLPattern) and pattern.name != "api-root":
            found.append(
                URLPattern(
                    pattern.pattern, guard(pattern.callback), pattern.default_args, pattern.name
                )
            )
        else:
            found.append(pattern)
    unknown = guard(lambda request, **_: problems.unknown_address(request))
    return [path("", unknown), *found, re_path(r"^.*$", unknown)]


def guard(view: View) -> View:
    @functools.wraps(view, assigned=("__doc__",))
    def passed(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.method == "HEAD":
            request.method = "GET"  # the server that sends the answer leaves its body out
        if "\0" in request.path_info or "%00" in request.META.get("QUERY_STRING", ""):
            # PostgreSQL refuses such a text, SQLite searches in vain
            return problems.malformed_address(request)
        try:
            read_body(request, limit=settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
            response = view(request, *args, **kwargs)
        except RequestDataTooBig:
            return problems.too_large(request)
        except Exception as error:  # what fails outside an operation: its throttle, its parsing, its answer's shape
            return problems.crashed(request, error)
        if response.status_code == 405 and response["Content-Type"] != problems.MEDIA_TYPE:
            return problems.method_not_allowed(request, str(response.get("Allow", "")))
        if isinstance(response, HttpResponse) and not response.has_header("Cache-Control"):
            response["Cache-Control"] = (
                "no-store" if request.method != "GET" else "private, no-cache"
            )
        return response

    passed.csrf_exempt = True  # type: ignore[attr-defined]  # auth.Session checks it, for sessions only
    return passed


def read_body(request: HttpRequest, *, limit: int) -> None:
    """Reads the body, at most `limit` bytes of it; raises RequestDataTooBig before anything parses
    it.

    Django compares the announced length only; a chunked body announces none.
    """
    if int(request.META.get("CONTENT_LENGTH") or 0) > limit:
        raise RequestDataTooBig
    if not request.META.get("CONTENT_LENGTH") and not hasattr(request, "_body"):
        body = request.read(limit + 1)
        if len(body) > limit:
            raise RequestDataTooBig
        request._body = body
