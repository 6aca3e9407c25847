"""Access to pages: login, roles, and refusals as pages or messages."""

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
from django.utils.translation import gettext as _

from orchestrator.accounts.roles import Role, at_least
from orchestrator.common.errors import Refusal, forbidden

View = Callable[..., HttpResponseBase]


class PageRequest(HttpRequest):
    """Request of a logged-in user; `htmx` is true if only a part of the page is requested."""

    user: Any
    htmx: Any


def page(view: View) -> View:
    """Decorate a view: requires a login, and shows a service's Refusal as a page."""

    @login_required
    @functools.wraps(view)
    def shown(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            return view(request, *args, **kwargs)
        except Refusal as refusal:
            return refused(request, refusal)

    return shown


def refused(request: HttpRequest, refusal: Refusal) -> HttpResponse:
    """Render a refusal as a page with its status."""
    response = render(request, "webui/refusal.html", {"refusal": refusal}, status=refusal.status)
    if refusal.retry_after_s is not None:
        response["Retry-After"] = str(refusal.retry_after_s)
    return response


def has_role(user: Any, role: Role) -> bool:
    """Whether the user has at least this role."""
    return bool(user.is_superuser or at_least(user.role, role))


def require_role(user: Any, role: Role, what: str) -> None:
    """Raise Refusal 403 unless the user has at least `role`; `what` names the page or action."""
    if not has_role(user, role):
        raise forbidden(
            _(
                "%(what)s requires the role %(required)s or higher; you have %(role)s. Ask an "
                "administrator."
            )
            % {"what": what, "required": role.value, "role": user.role}
        )


def redirect_with_message(
    request: HttpRequest, message: str, where: str, *args: Any
) -> HttpResponseRedirect:
    """Redirect to a page and show a success message there."""
    messages.success(request, message)
    return redirect(where, *args)


def next_url(request: HttpRequest, otherwise: str) -> str:
    """Return the form's `next` URL if it is on this site, else `otherwise`."""
    target = request.POST.get("next", "")
    if url_has_allowed_host_and_scheme(
        target, {request.get_host()}, require_https=request.is_secure()
    ):
        return target
    return otherwise


def field_errors(refusal: Refusal) -> dict[str, list[dict[str, str]]]:
    """Group a refusal's errors by field, without a leading `spec.`."""
    by_field: dict[str, list[dict[str, str]]] = {}
    for item in refusal.errors:
        by_field.setdefault(item["field"].removeprefix("spec."), []).append(item)
    return by_field
