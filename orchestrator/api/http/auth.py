"""Authentication: a bearer token, or a page's session with CSRF. Applies scopes and rate limits.

Selectors and services decide whether the caller may see or change a particular object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja.errors import AuthenticationError
from ninja.security import HttpBearer
from ninja.security.apikey import APIKeyCookie

from orchestrator.accounts import selectors as accounts
from orchestrator.accounts.roles import SCOPES
from orchestrator.api.http import throttle
from orchestrator.api.http.problems import refuse
from orchestrator.common.errors import Refusal

_TOKEN_HINT = (
    "Create a token on the page Tokens, by POST /api/v1/tokens or by `manage.py token USERNAME`."
)


@dataclass(frozen=True)
class Caller:
    """The authenticated user, the token of the call (None: a session), and the allowed scopes."""

    user: Any
    token: Any
    scopes: frozenset[str]


def caller(request: HttpRequest) -> Caller:
    """The authenticated caller of an operation with `auth=`."""
    authenticated = getattr(request, "auth", None)
    assert isinstance(authenticated, Caller), "the operation has no auth="
    return authenticated


def user(request: HttpRequest) -> Any:
    """The authenticated user."""
    return caller(request).user


def require_scope(scope: str) -> list[Callable[[HttpRequest], Caller | None]]:
    """The `auth=` of an operation that requires this scope."""
    assert scope in SCOPES, scope
    return [_bearers[scope], _sessions[scope]]


def address(request: HttpRequest) -> str:
    """The client's address; behind our TLS proxy the last one in X-Forwarded-For."""
    if settings.ENV.behind_https:
        forwarded = request.headers.get("X-Forwarded-For", "")
        if forwarded:
            return forwarded.rsplit(",", 1)[-1].strip()
    return str(request.META.get("REMOTE_ADDR") or "")


class Bearer(HttpBearer):
    """`Authorization: Bearer TOKEN`."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        super().__init__()

    def authenticate(self, request: HttpRequest, token: str) -> Caller:
        """The caller of a valid token with the scope; raises Refusal 401, 403 or 429."""
        try:
            person, api_token = accounts.token_check(token.strip())
        except Refusal as refusal:
            throttle.check(f"ip:{_short(address(request))}")
            raise refuse(
                refusal.type, refusal.title, refusal.status, f"{refusal.detail} {_TOKEN_HINT}"
            ) from None
        request.user = person
        current = Caller(person, api_token, accounts.token_scopes(person, api_token))
        throttle.check(f"token:{api_token.digest[:16]}")
        _check_scope(current, self.scope)
        return current


class Session(APIKeyCookie):
    """The cookie of a logged-in page; unsafe methods need its CSRF token."""

    param_name = settings.SESSION_COOKIE_NAME

    def __init__(self, scope: str) -> None:
        self.scope = scope
        super().__init__(csrf=True)

    def _get_key(self, request: HttpRequest) -> str | None:
        # without a login: 401, before the CSRF check
        if not request.user.is_authenticated:
            throttle.check(f"ip:{_short(address(request))}")
            raise AuthenticationError
        return super()._get_key(request)

    def authenticate(self, request: HttpRequest, key: str | None) -> Caller | None:
        """The caller of a session whose role has the scope; raises Refusal 403 or 429."""
        caller: Any = request.user  # `_get_key` refuses anonymous requests
        current = Caller(caller, None, accounts.allowed_scopes(caller))
        throttle.check(f"user:{request.user.pk}")
        _check_scope(current, self.scope)
        return current


def _check_scope(current: Caller, scope: str) -> None:
    if scope in current.scopes:
        return
    if scope in accounts.allowed_scopes(current.user):
        raise refuse(
            "scope-missing",
            "The token lacks a scope",
            403,
            f"This call requires the scope {scope}; the token {current.token.name!r} has "
            f"{', '.join(sorted(current.scopes)) or 'none'}. Create a token with that scope.",
        )
    raise refuse(
        "role-refused",
        "Your role does not allow this",
        403,
        f"This call requires the scope {scope} of the role {SCOPES[scope].value} or higher; "
        f"{current.user.get_username()} is {current.user.role}. Ask an administrator.",
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_bearers = {scope: Bearer(scope) for scope in SCOPES}
_sessions = {scope: Session(scope) for scope in SCOPES}
