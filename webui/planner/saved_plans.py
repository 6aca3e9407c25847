"""Views of saved plans: list, save and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.planner.store import selectors, services
from webui.forms.forecast import planner_query
from webui.planner import phrases
from webui.planner.form import parse_form
from webui.views.access import PageRequest, page, redirect_with_message, require_role

SHOWN = 100


@page
@require_GET
def saved(request: PageRequest) -> HttpResponse:
    """Lists the saved plans that the user may see."""
    rows = list(selectors.saved_plans_visible_to(user=request.user)[:SHOWN])
    mine = sum(row.owner_id == request.user.pk for row in rows)
    rest = _("No saved plans yet.")
    if rows:
        rest = _("%(count)s saved, %(mine)s of them yours.") % {"count": len(rows), "mine": mine}
    for row in rows:
        row.link = row.link or _link(row.line)
    context = {"tab": "planner-saved", "plans": rows, "headline": "", "rest": rest}
    return render(request, "webui/planner/saved.html", context)


@page
@require_POST
def save(request: PageRequest) -> HttpResponse:
    """Saves the plan of the link `query` under a name."""
    require_role(request.user, Role.SUBMITTER, _("Saving plans"))
    query = request.POST.get("query", "")
    state = parse_form(QueryDict(query))
    plan = state.plan_dict(state.plan) if state.plan else None
    if state.problems or plan is None:
        detail = (
            phrases.listed_problems(state.problems)
            if state.problems
            else _("The link names no plan.")
        )
        raise Refusal("plan-invalid", _("No plan to save"), 422, detail)
    line = state.line(plan)
    name = (
        request.POST.get("name", "").strip()
        or f"{state.values['model']}: {phrases.glyph(plan)}"[:160]
    )
    link = f"{reverse('planner')}?{state.query()}"
    services.plan_save(
        by=request.user,
        name=name,
        line=line,
        link=link if len(link) <= 2000 else "",
        devices=selectors.own_devices(user=request.user),
    )
    return redirect_with_message(
        request, _("Saved plan %(name)s.") % {"name": name}, "planner-saved"
    )


@page
@require_POST
def forget(request: PageRequest, id: int) -> HttpResponse:
    """Deletes a saved plan."""
    row = selectors.saved_plan_get(user=request.user, id=id)
    services.plan_delete(plan=row, by=request.user)
    return redirect("planner-saved")


def _link(line: Mapping[str, Any]) -> str:
    """Returns the link of a plan saved through REST; empty if the page cannot show it."""
    state, plan = line.get("workload") or {}, dict(line.get("plan") or {})
    plan["global_batch_size"] = plan.get("global_batch_size") or state.get("global_batch_size")
    if not plan["global_batch_size"]:
        return ""
    spec = {"model": line.get("model"), "train": {"seq_len": state.get("seq_len")}}
    query = planner_query(spec, {"plan": plan, "prediction": {"cluster": line.get("cluster")}})
    more = {"tokens": state.get("tokens"), "framework": (line.get("framework") or {}).get("name")}
    suffix = urlencode({name: value for name, value in more.items() if value})
    return f"{reverse('planner')}?{query}&{suffix}" if query else ""
