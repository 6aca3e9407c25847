"""Account pages: profile, password, tokens; for administrators users, audit log and settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.forms import PasswordChangeForm
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts import audit_log, selectors, services
from orchestrator.accounts.roles import SCOPES, Role, scopes_of
from orchestrator.common.errors import Refusal, missing_object
from webui.views.access import (
    PageRequest,
    field_errors,
    has_role,
    page,
    redirect_with_message,
    require_role,
)

LIFETIMES = (
    ("30", gettext_noop("30 days")),
    ("90", gettext_noop("90 days")),
    ("365", gettext_noop("1 year")),
    ("", gettext_noop("no expiry")),
)
SECRET = {
    "secret_key",
    "secret_key_fallbacks",
    "database_url",
    "redis_url",
    "smtp_url",
    "oidc_client_secret",
}
AUDIT_PAGE = 100
AUDIT_FIELDS = ("text", "action", "user", "since", "until")


@page
@require_GET
def account(request: PageRequest) -> HttpResponse:
    """Show the user's role, scopes and teams."""
    user = request.user
    return render(
        request, "webui/account.html", {"teams": user.teams.all(), "scopes": scopes_of(user.role)}
    )


@sensitive_post_parameters()
@page
@require_http_methods(["GET", "POST"])
def password(request: PageRequest) -> HttpResponse:
    """Change the password; other sessions are logged out."""
    form = PasswordChangeForm(request.user, data=request.POST or None)
    if request.method == "POST" and form.is_valid():
        first = request.user.must_change_password
        services.password_change(user=request.user, password=form.cleaned_data["new_password1"])
        update_session_auth_hash(request, request.user)
        if first:  # the file with the temporary password is outdated now
            (settings.ENV.home / "first-login").unlink(missing_ok=True)
        return redirect_with_message(
            request, _("Password changed. Your other sessions are logged out."), "account"
        )
    return render(
        request, "webui/password.html", {"form": form}, status=422 if form.errors else 200
    )


@page
@never_cache
@require_http_methods(["GET", "POST"])
def tokens(request: PageRequest) -> HttpResponse:
    """List tokens and create one; its text is only in the response to that POST."""
    user, status = request.user, 200
    context: dict[str, Any] = {
        "lifetimes": [(days, _(label)) for days, label in LIFETIMES],
        "typed": request.POST,
        "url": request.build_absolute_uri("/"),
        "scopes": [
            (scope, _(_SCOPE_DESCRIPTIONS[scope]), SCOPES[scope]) for scope in scopes_of(user.role)
        ],
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
            context |= {"created": token, "text": text}
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
            status = refusal.status
    context["tokens"] = selectors.tokens_of(user=user)
    return render(request, "webui/tokens.html", context, status=status)


@page
@require_POST
def token_revoke(request: PageRequest, id: int) -> HttpResponse:
    """Revoke a token of the user."""
    token = selectors.token_get(user=request.user, id=id)
    if token is None:
        raise missing_object("token", id)
    services.token_revoke(token=token, by=request.user)
    return redirect_with_message(
        request,
        _("Token %(name)s is revoked; requests with it are refused.") % {"name": token.name},
        "tokens",
    )


@page
@require_GET
def audit(request: PageRequest) -> HttpResponse:
    """Show the audit log, paged by id, or as CSV: admins see all entries, others their own."""
    typed = {name: request.GET.get(name, "").strip()[:200] for name in AUDIT_FIELDS}
    wanted, before = audit_log.Search(**typed), request.GET.get("before", "")
    refusal = None
    try:
        entries = audit_log.search(user=request.user, wanted=wanted)
    except Refusal as refused:
        refusal, entries = refused, audit_log.search(user=request.user, wanted=audit_log.Search())
    if request.GET.get("format") == "csv" and refusal is None:
        lines = "".join(audit_log.csv_lines(entries))
        response = HttpResponse(lines, content_type="text/csv; charset=utf-8")
        response["Content-Disposition"] = content_disposition_header(True, "audit.csv") or ""
        return response
    if before.isdecimal() and len(before) < 19:
        entries = entries.filter(pk__lt=int(before))
    rows = list(entries[: AUDIT_PAGE + 1])
    older = rows[AUDIT_PAGE - 1].pk if len(rows) > AUDIT_PAGE else None
    context = {
        "entries": rows[:AUDIT_PAGE],
        "older": older,
        "typed": typed,
        "query": urlencode(wanted.to_dict()),
        "refusal": refusal,
        "all": has_role(request.user, Role.ADMIN),
    }
    return render(request, "webui/audit.html", context, status=refusal.status if refusal else 200)


@page
@require_http_methods(["GET", "POST"])
def people(request: PageRequest) -> HttpResponse:
    """List users and add one."""
    require_role(request.user, Role.ADMIN, _("The list of users"))
    context: dict[str, Any] = {
        "roles": [(role.value, _(_ROLE_DESCRIPTIONS[role])) for role in Role],
        "typed": request.POST,
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
            return redirect_with_message(
                request,
                _("%(name)s can log in now and must choose a new password.") % {"name": name},
                "people",
            )
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
    context["people"] = selectors.people_visible_to(user=request.user).prefetch_related("teams")
    status = context["refusal"].status if "refusal" in context else 200
    return render(request, "webui/people.html", context, status=status)


@page
@require_POST
def role_set(request: PageRequest, username: str) -> HttpResponse:
    """Set a user's role."""
    require_role(request.user, Role.ADMIN, _("Changing roles"))
    person = selectors.user_get(username)
    if person is None:
        raise missing_object("person", username)
    services.user_role_set(user=person, role=request.POST.get("role", ""), by=request.user)
    return redirect_with_message(
        request,
        _("%(name)s now has the role %(role)s.") % {"name": person.username, "role": person.role},
        "people",
    )


@page
@require_GET
def installation(request: PageRequest) -> HttpResponse:
    """Show the settings; of secrets only whether they are set."""
    require_role(request.user, Role.OPERATOR, _("The settings page"))
    env, rows = settings.ENV, []
    for field, info in type(env).model_fields.items():
        value = getattr(env, field)
        name = field.upper()
        if field not in ("database_url", "redis_url"):
            name = f"ORRERY_{name}"
        is_set = value != info.default
        shown = (_("set") if value else _("not set")) if field in SECRET else _plain(field, value)
        rows.append(
            {
                "name": name,
                "value": shown,
                "is_set": is_set,
                "description": (info.description or "").replace("`", ""),
            }
        )
    return render(
        request,
        "webui/settings.html",
        {"rows": rows, "changed": sum(row["is_set"] for row in rows)},
    )


def _plain(field: str, value: Any) -> str:
    """Format a setting; its name ends with the unit, such as `_s` or `_days`."""
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, int | float):
        unit = {"s": " s", "days": _(" days"), "mib": " MiB"}.get(field.rpartition("_")[2], "")
        return f"{value:,.15g}{unit}"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or _("none")
    return str(value) or _("none")


_SCOPE_DESCRIPTIONS = {
    "read": gettext_noop("read runs, nodes and metrics"),
    "tokens": gettext_noop("create and revoke your tokens"),
    "runs": gettext_noop("submit and manage runs"),
    "ingest": gettext_noop("send points, events and logs"),
    "fleet": gettext_noop("drain and add nodes"),
    "admin": gettext_noop("users and audit log"),
}
_ROLE_DESCRIPTIONS = {
    Role.VIEWER: gettext_noop("can view the runs of their teams"),
    Role.SUBMITTER: gettext_noop("can also submit and manage their own runs"),
    Role.OPERATOR: gettext_noop("can also manage all runs and nodes"),
    Role.ADMIN: gettext_noop("can also manage users and settings"),
}
