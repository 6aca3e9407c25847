"""Who calls, and with which scopes: a bearer token, or a page's session with CSRF. Counts calls on
the way.

Knows scopes and roles; whether the caller may see or touch a particular thing is the selectors' and
services' answer.
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
from orchestrator.accounts.roles import SCOPES, scopes_of
from orchestrator.api.http import throttle
from orchestrator.api.http.problems import refuse
from orchestrator.common.errors import Refusal

_MAKE_ONE = "The page Tokens, POST /api/v1/tokens and `manage.py token USERNAME` make tokens."


@dataclass(frozen=True)
class Caller:
    """A person, the token they came with (None: a session), and what both together may do."""

    user: Any
    token: Any
    scopes: frozenset[str]


def caller(request: HttpRequest) -> Caller:
    """The authenticated caller; every operation but the public ones has one."""
    found = getattr(request, "auth", None)
    assert isinstance(found, Caller), "an operation without auth= asked who calls"
    return found


def user(request: HttpRequest) -> Any:
    return caller(request).user


def needs(scope: str) -> list[Callable[[HttpRequest], Caller | None]]:
    """The `auth=` of an operation that wants this scope."""
    assert scope in SCOPES, scope
    return [_bearers[scope], _sessions[scope]]


def address(request: HttpRequest) -> str:
    """The caller's address; behind a TLS proxy of ours the one that it appended last."""
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
        try:
            person, api_token = accounts.token_check(token.strip())
        except Refusal as refusal:
            throttle.check(f"ip:{_short(address(request))}")
            raise refuse(
                refusal.type, refusal.title, refusal.status, f"{refusal.detail} {_MAKE_ONE}"
            ) from None
        request.user = person
        who = Caller(person, api_token, frozenset(api_token.scopes) & allowed_scopes(person))
        throttle.check(f"token:{api_token.digest[:16]}")
        _check_scope(who, self.scope)
        return who


class Session(APIKeyCookie):
    """The cookie of a logged-in page; unsafe methods need its CSRF token."""

    param_name = settings.SESSION_COOKIE_NAME

    def __init__(self, scope: str) -> None:
        self.scope = scope
        super().__init__(csrf=True)

    def _get_key(self, request: HttpRequest) -> str | None:
        # nobody is logged in: 401, before a CSRF cookie is asked for
        if not request.user.is_authenticated:
            throttle.check(f"ip:{_short(address(request))}")
            raise AuthenticationError
        return super()._get_key(request)

    def authenticate(self, request: HttpRequest, key: str | None) -> Caller | None:
        who = Caller(request.user, None, allowed_scopes(request.user))
        throttle.check(f"user:{request.user.pk}")
        _check_scope(who, self.scope)
        return who


def allowed_scopes(person: Any) -> frozenset[str]:
    """What the person's role allows, with or without a token."""
    return frozenset(SCOPES if person.is_superuser else scopes_of(person.role))


def _check_scope(who: Caller, scope: str) -> None:
    if scope in who.scopes:
        return
    if scope in allowed_scopes(who.user):
        raise refuse(
            "scope-missing",
            "The token does not reach this far",
            403,
            f"This call needs the scope {scope}, the token {who.token.name!r} has "
            f"{', '.join(sorted(who.scopes)) or 'none'}. Make a token with that scope.",
        )
    raise refuse(
        "role-refused",
        "Your role does not allow this",
        403,
        f"This call needs the scope {scope}, which roles from {SCOPES[scope].value} upwards have; "
        f"{who.user.get_username()} is {who.user.role}. Ask an administrator.",
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_bearers = {scope: Bearer(scope) for scope in SCOPES}
_sessions = {scope: Session(scope) for scope in SCOPES}
