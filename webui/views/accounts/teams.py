"""Team pages: the list with the month's use, and one team with members, roles and budget."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts import selectors
from orchestrator.accounts import teams as services
from orchestrator.accounts.roles import Role
from orchestrator.background_jobs.usage import budgets, reports
from orchestrator.common.errors import Refusal, invalid
from orchestrator.dashboards import selectors as dashboards
from orchestrator.scheduling.reserved import guarantees
from webui.panels.pinned_panels import pinned_panels
from webui.views.access import PageRequest, has_role, page, redirect_with_message, require_role
from webui.views.list_with_form import list_with_form

ROLES = (
    (Role.VIEWER, gettext_noop("sees the runs of the team")),
    (Role.SUBMITTER, gettext_noop("also submits runs that the team sees")),
    (Role.OPERATOR, gettext_noop("also manages the runs of all members")),
    (Role.ADMIN, gettext_noop("also adds and removes members")),
)


@page
@require_http_methods(["GET", "POST"])
def teams(request: PageRequest) -> HttpResponse:
    """List the user's teams, for operators all; POST creates a team."""

    def content() -> dict[str, Any]:
        rows = list(services.teams_visible_to(user=request.user))
        used = budgets.uses(rows)
        most = max((use.device_hours for use in used.values()), default=0.0)
        return {
            "rows": [
                {
                    "team": team,
                    "use": used[team.pk],
                    "part": 100 * used[team.pk].device_hours / most if most else 0,
                }
                for team in rows
            ],
            "may_create": has_role(request.user, Role.ADMIN),
        }

    return list_with_form(
        request,
        "webui/teams.html",
        create=lambda each: services.team_create(name=each.POST.get("name", ""), by=each.user),
        address="team",
        content=content,
    )


@page
@require_GET
def team(request: PageRequest, id: int) -> HttpResponse:
    """Show members with their use, and the budget."""
    return _team(request, id)


def _team(request: PageRequest, id: int, refusal: Refusal | None = None) -> HttpResponse:
    row = services.team_get(user=request.user, id=id)
    use = budgets.use_of(row)
    people = reports.report(
        user=request.user, since=use.since, until=reports.period("", "")[1], by="person"
    )
    hours = {each.key: each.device_s / 3600 for each in people.rows}
    members = list(services.members_of(team=row))
    most = max((hours.get(each.user.username, 0.0) for each in members), default=0.0)
    names = {each.user.username for each in members}
    administers = services.may_administer(request.user, row)
    context = {
        "team": row,
        **pinned_panels(request.user, team=row),
        "may_create": dashboards.may_write_for(row, request.user),
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        "use": use,
        "part": min(100.0, 100 * (use.share or 0.0)),
        "members": [
            {
                "name": each.user.username,
                "role": each.role,
                "hours": hours.get(each.user.username, 0.0),
                "part": 100 * hours.get(each.user.username, 0.0) / most if most else 0,
                "is_active": each.user.is_active,
            }
            for each in members
        ],
        "member": request.user.username in names,
        "roles": [(role.value, _(text)) for role, text in ROLES],
        "others": [
            user.username
            for user in (selectors.people_all() if administers else [])
            if user.username not in names
        ],
        "may_administer": administers,
        "may_set_budget": has_role(request.user, Role.ADMIN),
        "held": guarantees.team_use(row),
        "pools": [pool.name for pool in guarantees.pools_to_guarantee()],
        "refusal": refusal,
        "typed": request.POST,
    }
    return render(request, "webui/team.html", context, status=refusal.status if refusal else 200)


@page
@require_POST
def team_change(request: PageRequest, id: int) -> HttpResponse:
    """Rename the team or set budget, quota and share; an empty budget or quota removes it."""
    row, typed = services.team_get(user=request.user, id=id), request.POST
    try:
        budget, quota, share = (typed.get(name) for name in ("budget", "max_devices", "share"))
        services.team_update(
            team=row,
            by=request.user,
            name=typed.get("name"),
            budget_device_hours=_hours(budget) if budget and budget.strip() else None,
            without_budget=budget is not None and not budget.strip(),
            max_devices=_devices("max_devices", quota) if quota and quota.strip() else None,
            without_quota=quota is not None and not quota.strip(),
            share=_number("share", share, _("Enter a number; the usual share is 1."))
            if share
            else None,
        )
    except Refusal as refusal:
        return _team(request, id, refusal)
    return redirect_with_message(request, _("Saved."), "team", row.pk)


@page
@require_POST
def team_guarantee(request: PageRequest, id: int) -> HttpResponse:
    """Guarantee the team devices of a pool; 0 ends the guarantee."""
    row, typed = services.team_get(user=request.user, id=id), request.POST
    require_role(request.user, Role.ADMIN, _("Guaranteeing devices"))
    try:
        pool = _pool(typed.get("pool", ""))
        devices = _devices("devices", typed.get("devices", ""))
        guarantees.guarantee_set(team=row, pool=pool, devices=devices, by=request.user)
    except Refusal as refusal:
        return _team(request, id, refusal)
    if devices:
        text = _("Pool %(pool)s guarantees %(devices)s devices to %(team)s.")
    else:
        text = _("Pool %(pool)s guarantees no devices to %(team)s.")
    values = {"pool": pool.name, "devices": devices, "team": row.name}
    return redirect_with_message(request, text % values, "team", row.pk)


@page
@require_POST
def team_delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete the team."""
    row = services.team_get(user=request.user, id=id)
    services.team_delete(team=row, by=request.user)
    text = _("Team %(name)s is deleted; its members keep their runs.") % {"name": row.name}
    return redirect_with_message(request, text, "teams")


@page
@require_POST
def member_set(request: PageRequest, id: int) -> HttpResponse:
    """Add a member or change the role."""
    row, typed = services.team_get(user=request.user, id=id), request.POST
    try:
        member = services.member_set(
            team=row,
            username=typed.get("username", ""),
            role=typed.get("role", Role.SUBMITTER.value),
            by=request.user,
        )
    except Refusal as refusal:
        return _team(request, id, refusal)
    text = _("%(name)s now has the role %(role)s in this team.")
    values = {"name": member.user.username, "role": member.role}
    return redirect_with_message(request, text % values, "team", row.pk)


@page
@require_POST
def member_remove(request: PageRequest, id: int, username: str) -> HttpResponse:
    """Take a member out of the team, or leave it."""
    row = services.team_get(user=request.user, id=id)
    services.member_remove(team=row, username=username, by=request.user)
    text = _("%(name)s is no longer in %(team)s.") % {"name": username, "team": row.name}
    if services.teams_visible_to(user=request.user).filter(pk=row.pk).exists():
        return redirect_with_message(request, text, "team", row.pk)
    return redirect_with_message(request, text, "teams")


def _hours(text: str) -> float:
    return _number("budget", text, _("Enter a number of device-hours."))


def _pool(name: str) -> Any:
    for pool in guarantees.pools_to_guarantee():
        if pool.name == name:
            return pool
    message = _("there is no pool %(name)s") % {"name": repr(name[:80])}
    raise invalid("pool", message, _("Use a pool of Orrery's own nodes."))


def _devices(field: str, text: str) -> int:
    try:
        return int(text.replace(",", "").strip())
    except ValueError:
        raise _not_a_number(field, text, _("Use a whole number of devices.")) from None


def _number(field: str, text: str, hint: str) -> float:
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        raise _not_a_number(field, text, hint) from None


def _not_a_number(field: str, text: str, hint: str) -> Refusal:
    return invalid(field, _("%(text)s is not a number") % {"text": repr(text[:20])}, hint)
