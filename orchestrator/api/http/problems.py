"""Errors as RFC 9457 problem details with stable types under https://orrery.dev/problems/."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic
from django.conf import settings
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError

from orchestrator.common import live
from orchestrator.common.errors import Refusal
from workers.contracts.base import Contract, Problem, as_sentences, validation_problems

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class ProblemDetails(Contract):
    """The body of every response with a status of 400 or above."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[Problem] = []
    retry: bool = False


class Invalid(Exception):
    """Input that does not match its contract; has one problem per field."""

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


def missing_object(what: str, which: object, where: str) -> Refusal:
    """404, also for objects that the caller may not see. GET `where` lists the visible ones."""
    return refuse(
        "not-found",
        f"No such {what}",
        404,
        f"There is no {what} {which}, or you may not see it. GET {where} lists what you may see.",
    )


def problem_response(
    request: HttpRequest,
    slug: str,
    title: str,
    status: int,
    detail: str,
    errors: Iterable[Mapping[str, Any]] = (),
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    """Problem details as a response."""
    return _response(request, Refusal(slug, title, status, detail, errors), headers)


def _response(
    request: HttpRequest, error: Refusal, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    body = live.dumps(error.problem(request.path))
    response = HttpResponse(body, status=error.status, content_type=MEDIA_TYPE, headers=headers)
    response["Cache-Control"] = "no-store"
    return response


def install(api: NinjaAPI) -> None:
    """Register a handler for every exception type."""
    handlers: dict[type[Exception], Any] = {
        Refusal: _refusal,
        Invalid: _invalid,
        pydantic.ValidationError: lambda request, error: _invalid(
            request, Invalid(validation_problems(error))
        ),
        HttpError: _http,
        Http404: lambda request, error: unknown_path(request),
        PermissionDenied: _denied,
        RequestDataTooBig: lambda request, error: too_large(request),
        Exception: internal_error,
    }
    for kind, handler in handlers.items():
        api.add_exception_handler(kind, handler)


def unknown_path(request: HttpRequest) -> HttpResponse:
    """404 for a path that no operation has."""
    return problem_response(
        request,
        "not-found",
        "No such path",
        404,
        f"No operation has the path {request.path}. /api/v1/openapi.json lists all paths; "
        "ids are integers.",
    )


def malformed_path(request: HttpRequest) -> HttpResponse:
    """400 for a path or query with U+0000."""
    return problem_response(
        request,
        "malformed-address",
        "The path is not text",
        400,
        "The path or query contains the character U+0000 (%00). Remove it.",
    )


def method_not_allowed(request: HttpRequest, allowed: str) -> HttpResponse:
    """405 with the allowed methods."""
    return problem_response(
        request,
        "method-not-allowed",
        "Method not allowed",
        405,
        f"{request.path} does not accept {request.method}; it accepts {allowed}.",
        headers={"Allow": allowed},
    )


def too_large(request: HttpRequest, limit: int | None = None) -> HttpResponse:
    """413 for a body above the limit, in bytes."""
    limit = int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE) if limit is None else limit
    return problem_response(
        request,
        "body-too-large",
        "The body is too large",
        413,
        f"The body is larger than {limit / 1e6:g} MB. Send it in parts; ORRERY_MAX_BODY_MB sets "
        "the limit.",
    )


DATABASE_DOWN = "Runs continue, and nodes store what they report. Try again in a minute."


def database_is_down(error: BaseException | None) -> bool:
    """Whether the error means that the database does not answer, not that a query is wrong."""
    return isinstance(error, OperationalError | InterfaceError)


def internal_error(request: HttpRequest, error: Exception) -> HttpResponse:
    """500 with an id that the log also has, without internal details.

    503 while the database does not answer.
    """
    if database_is_down(error):
        log.error("The database does not answer: %s", error)
        title, retry = "The database does not answer", {"Retry-After": "10"}
        return problem_response(
            request, "database-unavailable", title, 503, DATABASE_DOWN, headers=retry
        )
    error_id = secrets.token_hex(6)
    log.error("%s %s failed, id %s", request.method, request.path, error_id, exc_info=error)
    return problem_response(
        request,
        "internal-error",
        "Internal error",
        500,
        f"Internal error, id {error_id}. Try again; if it persists, give an administrator the id.",
    )


def _refusal(request: HttpRequest, error: Refusal) -> HttpResponse:
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="orrery", error="invalid_token"'
    elif error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return _response(request, error, headers)


def _invalid(request: HttpRequest, error: Invalid) -> HttpResponse:
    return problem_response(
        request,
        "invalid",
        "The request is not valid",
        422,
        as_sentences(error.problems),
        [item.to_dict() for item in error.problems],
    )


def _denied(request: HttpRequest, error: PermissionDenied) -> HttpResponse:
    return problem_response(
        request,
        "forbidden",
        "You may not do this",
        403,
        str(error) or "Your role does not allow this; ask an administrator for another role.",
    )


def _http(request: HttpRequest, error: HttpError) -> HttpResponse:
    """ninja's own errors: invalid JSON (400), no authentication (401), failed CSRF check (403)."""
    if isinstance(error.__cause__, Refusal):  # ninja maps every error in reading a body to 400
        return _refusal(request, error.__cause__)
    if error.status_code == 401:
        return problem_response(
            request,
            "not-authenticated",
            "Not authenticated",
            401,
            "This call requires a token or a login. Send `Authorization: Bearer TOKEN`; the page "
            "Tokens and `manage.py token USERNAME` create one.",
            headers={"WWW-Authenticate": 'Bearer realm="orrery"'},
        )
    if error.status_code == 403:
        return problem_response(
            request,
            "csrf-failed",
            "CSRF check failed",
            403,
            "A request with a session needs the header X-CSRFToken with the value of the cookie "
            "csrftoken. Programs use a bearer token instead.",
        )
    if error.status_code == 400:
        return problem_response(
            request,
            "malformed-body",
            "The body is not JSON",
            400,
            "The body is not a JSON document in UTF-8. Check its quotes, commas and encoding.",
        )
    return problem_response(
        request, "refused", "The request is refused", error.status_code, str(error)
    )
