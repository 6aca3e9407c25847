"""Authorizes calls of serve runs by an API token, the run's own key, or a session with CSRF.

Reads headers and the database, in a thread. A run that the caller may not see is a 404.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from django.conf import settings
from django.contrib.auth import get_user
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from ninja.utils import check_csrf

from orchestrator.accounts import selectors as accounts
from orchestrator.api.http import throttle
from orchestrator.api.serve.errors import ApiError, Scope
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import endpoint
from orchestrator.runs.outputs.endpoint import EndpointStatus

_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_TOKEN_HINT: Final = "Create one on the page Tokens."


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: `name` is `user:ID`, or `key` for the run's own key, which has no `user`."""

    run: Any  # runs.models.Run
    user: Any  # accounts.models.User, or None

    @property
    def name(self) -> str:
        """The name for fair queues."""
        return "key" if self.user is None else f"user:{self.user.pk}"


def authorize(
    scope: Scope, run_id: int, *, token_scope: str = "read"
) -> tuple[EndpointStatus, Caller]:
    """The endpoint of the run, and the caller; tokens need `token_scope`.

    Raises ApiError 401, 403, 404, 409, 429 or 503.
    """
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    caller = _authenticate(scope, headers, run_id, token_scope)
    run = caller.run
    if run.kind != "serve":
        message = (
            f"Run {run.pk} is of kind {run.kind}; only runs of kind serve have this API. Submit a "
            "serve run."
        )
        raise ApiError(404, "run_not_serving", message)
    endpoint_status = endpoint.status(run=run)
    if endpoint_status.phase == "ended":
        raise ApiError(409, "run_ended", endpoint_status.message)
    if endpoint_status.phase != "serving":
        code = "run_draining" if endpoint_status.phase == "draining" else "run_not_ready"
        raise ApiError(
            503,
            code,
            endpoint_status.message,
            retry_after_s=5 if endpoint_status.phase == "waiting" else 2,
        )
    return endpoint_status, caller


def _authenticate(
    scope: Scope, headers: Mapping[str, str], run_id: int, token_scope: str
) -> Caller:
    kind, _, text = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and text.strip():
        return _by_bearer(scope, headers, text.strip(), run_id, token_scope)
    request = ASGIRequest(scope, io.BytesIO())
    user = _logged_in(request)
    if user is None:
        _count(f"ip:{_digest(_address(scope, headers))}")
        message = (
            "No key was sent. Send Authorization: Bearer KEY with an Orrery token "
            f"({_TOKEN_HINT}) or "
            "the run's api_key."
        )
        raise ApiError(401, "missing_api_key", message)
    if scope["method"] not in _SAFE and _csrf_failed(request):
        message = (
            "A request with a session needs the header X-CSRFToken with the cookie's value; "
            "programs "
            "use a bearer token."
        )
        raise ApiError(403, "csrf_failed", message)
    _count(f"serve:user:{user.pk}")
    return Caller(_visible(user, run_id), user)


def _by_bearer(
    scope: Scope, headers: Mapping[str, str], text: str, run_id: int, token_scope: str
) -> Caller:
    try:
        user, token = accounts.token_check(text)
    except Refusal as refusal:
        if (run := endpoint.run_by_key(id=run_id, key=text)) is not None:
            _count(f"serve:key:{run.pk}")
            return Caller(run, None)
        _count(f"ip:{_digest(_address(scope, headers))}")
        message = f"{refusal.detail} Use an Orrery token ({_TOKEN_HINT}) or the run's api_key."
        raise ApiError(401, "invalid_api_key", message) from None
    _count(f"serve:token:{token.digest[:16]}")
    if token_scope not in token.scopes:
        raise ApiError(
            403,
            "scope_missing",
            f"The token {token.name!r} lacks the scope {token_scope}. Create one that has it.",
        )
    return Caller(_visible(user, run_id), user)


def _visible(user: Any, run_id: int) -> Any:
    try:
        return runs.run_get(user=user, id=run_id)
    except Refusal:
        message = (
            f"There is no run {run_id}, or you may not see it. GET /api/v1/runs?kind=serve lists "
            "those that you may see."
        )
        raise ApiError(404, "run_not_found", message) from None


def _logged_in(request: ASGIRequest) -> Any:
    key = request.COOKIES.get(settings.SESSION_COOKIE_NAME)
    if not key:
        return None
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(key)
    user = get_user(request)
    return user if user.is_authenticated and user.is_active else None


def _csrf_failed(request: ASGIRequest) -> bool:
    try:
        return check_csrf(request, lambda request: None) is not None
    except DisallowedHost:
        return True


def _count(ident: str) -> None:
    limit = int(settings.ENV.serve_per_minute)
    try:
        throttle.check(ident, limit=limit)
    except Refusal as refusal:
        wait_s = refusal.retry_after_s or 1
        message = (
            f"More than {limit} calls within a minute. Wait {wait_s} s; "
            "ORRERY_SERVE_PER_MINUTE sets the limit."
        )
        raise ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s) from None


def _address(scope: Scope, headers: Mapping[str, str]) -> str:
    forwarded = headers.get("x-forwarded-for", "") if settings.ENV.behind_https else ""
    return forwarded.rsplit(",", 1)[-1].strip() or str((scope.get("client") or ("",))[0])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
