"""What every page passes: a login, and a refusal told as a page or a message.

Knows no domain word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme

from orchestrator.accounts.roles import Role, at_least
from orchestrator.common.errors import Refusal, forbidden

View = Callable[..., HttpResponseBase]


class PageRequest(HttpRequest):
    """What a view behind `page` gets: somebody is logged in; `htmx` tells whether only a part of it
    is asked for.
    """

    user: Any
    htmx: Any


def page(view: View) -> View:
    """A page for people who are logged in; a service's refusal becomes a page that says what to do
    next.
    """

    @login_required
    @functools.wraps(view)
    def shown(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            return view(request, *args, **kwargs)
        except Refusal as refusal:
            return refused(request, refusal)

    return shown


def refused(request: HttpRequest, refusal: Refusal) -> HttpResponse:
    response = render(request, "webui/refusal.html", {"refusal": refusal}, status=refusal.status)
    if refusal.retry_after_s is not None:
        response["Retry-After"] = str(refusal.retry_after_s)
    return response


def may(user: Any, role: Role) -> bool:
    return bool(user.is_superuser or at_least(user.role, role))


def demand(user: Any, role: Role, what: str) -> None:
    """Raises Refusal 403 where the person's role is less than `role`; `what` completes the
    sentence.
    """
    if not may(user, role):
        raise forbidden(
            f"{what} is for roles from {role.value} upwards; you are {user.role}. Ask an "
            "administrator."
        )


def done(request: HttpRequest, says: str, where: str, *args: Any) -> HttpResponseRedirect:
    """Back to a page, with a sentence on it."""
    messages.success(request, says)
    return redirect(where, *args)


def back(request: HttpRequest, otherwise: str) -> str:
    """Where the form says it came from, if that is ours; a named address otherwise."""
    target = request.POST.get("next", "")
    if url_has_allowed_host_and_scheme(
        target, {request.get_host()}, require_https=request.is_secure()
    ):
        return target
    return otherwise


def field_errors(refusal: Refusal) -> dict[str, list[dict[str, str]]]:
    """A refusal's errors by field, a leading `spec.` left out."""
    found: dict[str, list[dict[str, str]]] = {}
    for item in refusal.errors:
        found.setdefault(item["field"].removeprefix("spec."), []).append(item)
    return found
