"""Runs before every API view: body limits, HEAD, malformed paths, and Django's own errors.

Does not depend on routes or users.
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


def guard_all(patterns: list[URLPattern | URLResolver]) -> list[URLPattern | URLResolver]:
    """The same patterns behind the middleware, and a 404 for all other paths."""
    guarded: list[URLPattern | URLResolver] = []
    for pattern in patterns:
        if isinstance(pattern, URLPattern) and pattern.name != "api-root":
            guarded.append(
                URLPattern(
                    pattern.pattern, guard(pattern.callback), pattern.default_args, pattern.name
                )
            )
        else:
            guarded.append(pattern)
    unknown = guard(lambda request, **_: problems.unknown_path(request))
    return [path("", unknown), *guarded, re_path(r"^.*$", unknown)]


def guard(view: View) -> View:
    """The view behind the middleware."""

    @functools.wraps(view, assigned=("__doc__",))
    def passed(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.method == "HEAD":
            request.method = "GET"  # the HTTP server omits the body
        if "\0" in request.path_info or "%00" in request.META.get("QUERY_STRING", ""):
            # PostgreSQL refuses such text, SQLite never matches it
            return problems.malformed_path(request)
        try:
            read_body(request, limit=settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
            response = view(request, *args, **kwargs)
        except RequestDataTooBig:
            return problems.too_large(request)
        except Exception as error:  # outside operations: throttle, parsing, response schema
            return problems.internal_error(request, error)
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
    """Read at most `limit` bytes of the body; raises RequestDataTooBig before it is parsed.

    Django checks only Content-Length, which a chunked body does not have.
    """
    if int(request.META.get("CONTENT_LENGTH") or 0) > limit:
        raise RequestDataTooBig
    if not request.META.get("CONTENT_LENGTH") and not hasattr(request, "_body"):
        body = request.read(limit + 1)
        if len(body) > limit:
            raise RequestDataTooBig
        request._body = body
