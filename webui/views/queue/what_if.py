"""What-if page: estimated starts of the live queue before and after a change."""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_http_methods

from orchestrator.accounts import teams
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, invalid
from orchestrator.scheduling.queue import what_if as services
from orchestrator.scheduling.reserved import guarantees
from orchestrator.scheduling.simulation.what_if import Change
from webui.presentation import formatting
from webui.views.access import PageRequest, page, require_role


@page
@require_http_methods(["GET", "POST"])
def what_if(request: PageRequest) -> HttpResponse:
    """Show the form; POST simulates the change and shows its result."""
    require_role(request.user, Role.OPERATOR, _("Simulating changes to the queue"))
    result, refusal = None, None
    if request.method == "POST":
        try:
            result = services.what_if(by=request.user, change=_change(request))
        except Refusal as refused:
            refusal = refused
    rows = [
        {
            "run": row.run,
            "before": _time(row.before_s),
            "after": _time(row.after_s),
            "sooner": row.before_s is not None
            and row.after_s is not None
            and row.after_s < row.before_s - 1,
        }
        for row in (result.rows if result else [])
    ]
    context = {
        "result": result,
        "rows": rows,
        "sentence": _sentence(result),
        "errors": (refusal.errors or [{"message": refusal.detail}]) if refusal else [],
        "pools": [pool.name for pool in guarantees.pools_to_guarantee()],
        "teams": [team.name for team in teams.teams_visible_to(user=request.user)],
        "typed": request.POST,
    }
    status = refusal.status if refusal else 200
    return render(request, "webui/simulator/what_if.html", context, status=status)


def _change(request: PageRequest) -> Change:
    typed = request.POST
    text = typed.get("add_nodes", "").strip() or "0"
    if not text.isdecimal() or len(text) > 9:
        raise invalid(
            "add_nodes",
            _("%(text)s is not a number of nodes") % {"text": repr(text[:20])},
            _("Use a whole number."),
        )
    return Change(typed.get("pool", ""), int(text), typed.get("pause_team", ""))


def _sentence(result: services.Result | None) -> str:
    if result is None:
        return _("When would waiting runs start if the fleet or the teams changed?")
    if not result.waiting:
        return _("No runs are waiting.")
    if result.before_s is None or result.after_s is None:
        return _(
            "The starts of the waiting runs are unknown: it is not known when the runs that hold "
            "the devices will end."
        )
    text = ngettext(
        "%(count)s waiting run would start in %(after)s instead of %(before)s.",
        "%(count)s waiting runs would start in %(after)s instead of %(before)s on average.",
        result.compared,
    )
    return text % {
        "count": f"{result.compared:,}",
        "before": formatting.duration(result.before_s),
        "after": formatting.duration(result.after_s),
    }


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return _("now") if seconds < 1 else formatting.duration(seconds)
