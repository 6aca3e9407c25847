"""One's own account: who I am, password, tokens; for administrators people, the audit log and the
settings.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.forms import PasswordChangeForm
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts import selectors, services
from orchestrator.accounts.roles import SCOPES, Role, scopes_of
from orchestrator.common.errors import Refusal, not_found
from webui.views.access import PageRequest, demand, done, field_errors, may, page

LIFETIMES = (("30", "30 days"), ("90", "90 days"), ("365", "a year"), ("", "until revoked"))
SECRET = {"secret_key", "database_url", "redis_url"}
AUDIT_PAGE = 100


@page
@require_GET
def account(request: PageRequest) -> HttpResponse:
    user = request.user
    return render(
        request, "webui/account.html", {"teams": user.teams.all(), "scopes": scopes_of(user.role)}
    )


@sensitive_post_parameters()
@page
@require_http_methods(["GET", "POST"])
def password(request: PageRequest) -> HttpResponse:
    form = PasswordChangeForm(request.user, data=request.POST or None)
    if request.method == "POST" and form.is_valid():
        first = request.user.must_change_password
        services.password_change(user=request.user, password=form.cleaned_data["new_password1"])
        update_session_auth_hash(request, request.user)
        if first:  # the file that told the first password tells a wrong one now
            (settings.ENV.home / "first-login").unlink(missing_ok=True)
        return done(
            request, "Your password is changed. Other sessions of yours are logged out.", "account"
        )
    return render(
        request, "webui/password.html", {"form": form}, status=422 if form.errors else 200
    )


@page
@never_cache
@require_http_methods(["GET", "POST"])
def tokens(request: PageRequest) -> HttpResponse:
    """The list, and the making of one: its text stands in the answer to that POST and nowhere else."""
    user, status = request.user, 200
    context: dict[str, Any] = {
        "lifetimes": LIFETIMES,
        "wanted": request.POST,
        "url": request.build_absolute_uri("/"),
        "scopes": [(scope, _SCOPE_SAYS[scope], SCOPES[scope]) for scope in scopes_of(user.role)],
    }
    if request.method == "POST":
        days = request.POST.get("days", "")
        expires = (
            timezone.now() + timedelta(days=int(days)) if days in ("30", "90", "365") else None
        )
        try:
            token, text = services.token_create(
                user=user,
                name=request.POST.get("name", ""),
                scopes=request.POST.getlist("scopes"),
                expires=expires,
                by=user,
            )
            context |= {"made": token, "text": text}
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
            status = refusal.status
    context["tokens"] = selectors.tokens_of(user=user)
    return render(request, "webui/tokens.html", context, status=status)


@page
@require_POST
def token_revoke(request: PageRequest, id: int) -> HttpResponse:
    token = selectors.token_get(user=request.user, id=id)
    if token is None:
        raise not_found("token", id)
    services.token_revoke(token=token, by=request.user)
    return done(
        request,
        f"The token {token.name} is revoked. Programs that use it are refused from now on.",
        "tokens",
    )


@page
@require_GET
def audit(request: PageRequest) -> HttpResponse:
    """Keyset by id; everyone sees what they did themselves, admins everything."""
    entries = selectors.audit_entries(user=request.user)
    action, before = request.GET.get("action", "").strip(), request.GET.get("before", "")
    if action:
        entries = entries.filter(action__startswith=action)
    if before.isdecimal():
        entries = entries.filter(pk__lt=int(before))
    rows = list(entries[: AUDIT_PAGE + 1])
    older = rows[AUDIT_PAGE - 1].pk if len(rows) > AUDIT_PAGE else None
    context = {
        "entries": rows[:AUDIT_PAGE],
        "older": older,
        "action": action,
        "all": may(request.user, Role.ADMIN),
    }
    return render(request, "webui/audit.html", context)


@page
@require_http_methods(["GET", "POST"])
def people(request: PageRequest) -> HttpResponse:
    demand(request.user, Role.ADMIN, "The list of people")
    context: dict[str, Any] = {
        "roles": [(role.value, _ROLE_SAYS[role]) for role in Role],
        "wanted": request.POST,
    }
    if request.method == "POST":
        name = request.POST.get("username", "").strip()
        try:
            services.user_create(
                username=name,
                password=request.POST.get("password") or None,
                role=request.POST.get("role", Role.SUBMITTER),
                must_change_password=True,
                by=request.user,
            )
            return done(
                request, f"{name} can log in now and is asked to choose another password.", "people"
            )
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
    context["people"] = selectors.people_visible_to(user=request.user).prefetch_related("teams")
    status = context["refusal"].status if "refusal" in context else 200
    return render(request, "webui/people.html", context, status=status)


@page
@require_POST
def role_set(request: PageRequest, username: str) -> HttpResponse:
    demand(request.user, Role.ADMIN, "Changing roles")
    person = selectors.user_get(username)
    if person is None:
        raise not_found("person", username)
    services.user_role_set(user=person, role=request.POST.get("role", ""), by=request.user)
    return done(request, f"{person.username} is {person.role} now.", "people")


@page
@require_GET
def installation(request: PageRequest) -> HttpResponse:
    """The settings in force. Secrets are told as given or made, never shown."""
    demand(request.user, Role.OPERATOR, "The settings page")
    env, rows = settings.ENV, []
    for item in fields(env):
        value = getattr(env, item.name)
        name = (
            item.name.upper()
            if item.name in ("database_url", "redis_url")
            else f"ORRERY_{item.name.upper()}"
        )
        given = value != item.default
        shown = ("given" if value else "not given") if item.name in SECRET else _plain(value)
        rows.append(
            {
                "name": name,
                "value": shown,
                "given": given,
                "says": item.metadata["message"].replace("`", ""),
            }
        )
    return render(
        request, "webui/settings.html", {"rows": rows, "changed": sum(row["given"] for row in rows)}
    )


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    return str(value) or "none"


_SCOPE_SAYS = {
    "read": "see runs, nodes and series",
    "runs": "submit and manage runs",
    "ingest": "send points, events and logs",
    "fleet": "drain nodes, let nodes join",
    "admin": "people, audit log",
}
_ROLE_SAYS = {
    Role.VIEWER: "sees what the team shares",
    Role.SUBMITTER: "and submits and manages own runs",
    Role.OPERATOR: "and manages everybody's runs and the nodes",
    Role.ADMIN: "and people and settings",
}
