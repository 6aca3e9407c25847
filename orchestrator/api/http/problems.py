"""Errors as RFC 9457 problem details: what, which, what next, with stable types under
https://orrery.dev/problems/.

Knows the shapes that errors arrive in; does not know what any call was for.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic
from django.conf import settings
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError

from orchestrator.common import live
from orchestrator.common.errors import Refusal
from workers.contracts.base import Contract, Problem, problems_of

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class ProblemAnswer(Contract):
    """The body of every answer with a status of 400 and above."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[Problem] = []
    retry: bool = False


class Invalid(Exception):
    """Input that does not fit its contract; carries one sentence a field."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(item) for item in problems))


def refuse(
    slug: str, title: str, status: int, detail: str, errors: Iterable[Mapping[str, str]] = ()
) -> Refusal:
    """A Refusal to raise from a view."""
    return Refusal(slug, title, status, detail, errors=errors)


def invalid(field: str, message: str, hint: str = "") -> Invalid:
    """One wrong parameter or field."""
    return Invalid([Problem(field=field, message=message, hint=hint)])


def not_found(what: str, which: object, where: str) -> Refusal:
    """Also for things the caller may not see: whether they exist is not told.

    `where` lists those there are.
    """
    return refuse(
        "not-found",
        f"No such {what}",
        404,
        f"There is no {what} {which}, or you may not see it. GET {where} lists those you may see.",
    )


def answer(
    request: HttpRequest,
    slug: str,
    title: str,
    status: int,
    detail: str,
    errors: Iterable[Mapping[str, Any]] = (),
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    """The problem document as a response."""
    return _response(request, Refusal(slug, title, status, detail, errors), headers)


def _response(
    request: HttpRequest, error: Refusal, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    body = live.dumps(error.problem(request.path))
    response = HttpResponse(body, status=error.status, content_type=MEDIA_TYPE, headers=headers)
    response["Cache-Control"] = "no-store"
    return response


def install(api: NinjaAPI) -> None:
    """Gives the API a handler for every way a call can fail."""
    handlers: dict[type[Exception], Any] = {
        Refusal: _refusal,
        Invalid: _invalid,
        pydantic.ValidationError: lambda request, error: _invalid(
            request, Invalid(problems_of(error))
        ),
        HttpError: _http,
        Http404: lambda request, error: unknown_address(request),
        PermissionDenied: _denied,
        RequestDataTooBig: lambda request, error: too_large(request),
        Exception: crashed,
    }
    for kind, handler in handlers.items():
        api.add_exception_handler(kind, handler)


def unknown_address(request: HttpRequest) -> HttpResponse:
    return answer(
        request,
        "not-found",
        "Nothing answers here",
        404,
        f"Nothing answers at {request.path}. /api/v1/openapi.json lists every address; "
        "identifiers are whole numbers.",
    )


def malformed_address(request: HttpRequest) -> HttpResponse:
    return answer(
        request,
        "malformed-address",
        "The address is not text",
        400,
        "The address holds the character U+0000 (%00), which no text has. Leave it out.",
    )


def method_not_allowed(request: HttpRequest, allowed: str) -> HttpResponse:
    return answer(
        request,
        "method-not-allowed",
        "This address does not take that method",
        405,
        f"{request.path} does not take {request.method}; it takes {allowed}.",
        headers={"Allow": allowed},
    )


def too_large(request: HttpRequest, limit: int | None = None) -> HttpResponse:
    limit = int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE) if limit is None else limit
    return answer(
        request,
        "body-too-large",
        "The body is too large",
        413,
        f"The body is larger than {limit / 1e6:g} MB. Send it in parts; ORRERY_MAX_BODY_MB sets "
        "the limit.",
    )


def crashed(request: HttpRequest, error: Exception) -> HttpResponse:
    """A fault of ours: told with a number that stands in the log, and nothing of its inside."""
    number = secrets.token_hex(6)
    log.error("%s %s failed, id %s", request.method, request.path, number, exc_info=error)
    return answer(
        request,
        "internal-error",
        "Orrery failed to answer",
        500,
        f"A fault of the server, id {number}. Try again; if it stays, tell an administrator the "
        "id.",
    )


def _refusal(request: HttpRequest, error: Refusal) -> HttpResponse:
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="orrery", error="invalid_token"'
    elif error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return _response(request, error, headers)


def _invalid(request: HttpRequest, error: Invalid) -> HttpResponse:
    return answer(
        request,
        "invalid",
        "The request is not valid",
        422,
        "; ".join(str(item) for item in error.problems[:3])
        + (f"; and {len(error.problems) - 3} more" if len(error.problems) > 3 else "")
        + ".",
        [item.to_dict() for item in error.problems],
    )


def _denied(request: HttpRequest, error: PermissionDenied) -> HttpResponse:
    return answer(
        request,
        "forbidden",
        "You may not do this",
        403,
        str(error) or "Your role does not allow this; ask an administrator for another role.",
    )


def _http(request: HttpRequest, error: HttpError) -> HttpResponse:
    """ninja's own: a body that is no JSON (400), a missing login (401), a failed CSRF check (403)."""
    if isinstance(error.__cause__, Refusal):  # ninja makes 400 of whatever reading a body raises
        return _refusal(request, error.__cause__)
    if error.status_code == 401:
        return answer(
            request,
            "not-authenticated",
            "Who are you?",
            401,
            "This call needs a token or a login. Send `Authorization: Bearer TOKEN`; the page "
            "Tokens and "
            "`manage.py token USERNAME` make one.",
            headers={"WWW-Authenticate": 'Bearer realm="orrery"'},
        )
    if error.status_code == 403:
        return answer(
            request,
            "csrf-failed",
            "The request did not come from our own page",
            403,
            "A session's request needs the header X-CSRFToken with the value of the cookie "
            "csrftoken. "
            "Programs send a bearer token in place of a session.",
        )
    if error.status_code == 400:
        return answer(
            request,
            "malformed-body",
            "The body is not JSON",
            400,
            "The body cannot be read as a JSON document in UTF-8. Check its quotes, commas and "
            "encoding.",
        )
    return answer(request, "refused", "The request is refused", error.status_code, str(error))
