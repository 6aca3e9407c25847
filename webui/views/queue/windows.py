"""Page of windows: maintenance of nodes and their reservation for teams."""

from __future__ import annotations

from datetime import UTC, datetime

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts import teams
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, invalid
from orchestrator.scheduling.reserved import guarantees
from orchestrator.scheduling.reserved import windows as services
from webui.views.access import PageRequest, has_role, page, redirect_with_message


@page
@require_http_methods(["GET", "POST"])
def windows(request: PageRequest) -> HttpResponse:
    """List the windows; POST creates one."""
    refusal: Refusal | None = None
    if request.method == "POST":
        try:
            _create(request)
            return redirect_with_message(request, _("The nodes are reserved."), "windows")
        except Refusal as error:
            refusal = error
    now, rows = clock.now(), list(services.windows())
    current = [row for row in rows if row.end > now]
    context = {
        "current": [{"window": row, "begun": row.start <= now} for row in current],
        "past": [row for row in rows[::-1] if row.end <= now],
        "sentence": _sentence(len(current), sum(row.start <= now for row in current)),
        "may_create": has_role(request.user, Role.OPERATOR),
        "pools": [pool.name for pool in guarantees.pools_to_guarantee()],
        "teams": [team.name for team in teams.teams_visible_to(user=request.user)],
        "errors": (refusal.errors or [{"message": refusal.detail}]) if refusal else [],
        "typed": request.POST,
    }
    return render(request, "webui/windows.html", context, status=refusal.status if refusal else 200)


@page
@require_POST
def delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a window."""
    services.window_delete(window=services.window_get(id), by=request.user)
    text = _("The window is deleted; its nodes take runs again.")
    return redirect_with_message(request, text, "windows")


def _create(request: PageRequest) -> None:
    typed = request.POST
    services.window_create(
        by=request.user,
        pool=typed.get("pool", ""),
        nodes=typed.get("nodes", "").replace(",", " ").split(),
        start=_time("start", typed.get("start", "")),
        end=_time("end", typed.get("end", "")),
        team=typed.get("team", ""),
        reason=typed.get("reason", ""),
    )


def _time(field: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        message = _("%(text)s is not a time") % {"text": repr(text[:20])}
        raise invalid(field, message, _("Use a time such as 2026-01-31T14:00, in UTC.")) from None


def _sentence(count: int, begun: int) -> str:
    if not count:
        return _("No nodes are reserved.")
    text = ngettext("%(count)s window is planned", "%(count)s windows are planned", count) % {
        "count": count
    }
    if begun:
        text += ngettext("; %(begun)s has begun", "; %(begun)s have begun", begun) % {
            "begun": begun
        }
    return text + "."
