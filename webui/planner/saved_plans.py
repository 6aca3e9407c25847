"""Plans that people keep: save the one a link shows, list one's own and team mates', forget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common.errors import Refusal
from orchestrator.planner.store import selectors, services
from webui.forms.forecast import planner_query
from webui.planner import phrases
from webui.planner.form import question
from webui.views.access import PageRequest, page, redirect_with_message

SHOWN = 100


@page
@require_GET
def saved(request: PageRequest) -> HttpResponse:
    rows = list(selectors.saved_plans_visible_to(user=request.user)[:SHOWN])
    mine = sum(row.owner_id == request.user.pk for row in rows)
    says = f"{len(rows)} kept, {mine} of them yours." if rows else "None is kept yet."
    for row in rows:
        row.link = row.link or _link(row.line)
    context = {"tab": "planner-saved", "plans": rows, "headline": "", "rest": says}
    return render(request, "webui/planner/saved.html", context)


@page
@require_POST
def save(request: PageRequest) -> HttpResponse:
    """Keeps the plan of the link `query` under a name; back to the same page with a sentence on it."""
    query = request.POST.get("query", "")
    asked = question(QueryDict(query))
    plan = asked.plan_dict(asked.plan) if asked.plan else None
    if asked.problems or plan is None:
        detail = (
            phrases.listed_problems(asked.problems) if asked.problems else "The link names no plan."
        )
        raise Refusal("plan-invalid", "There is no plan to keep", 422, detail)
    line = asked.line(plan)
    name = (
        request.POST.get("name", "").strip()
        or f"{asked.values['model']}: {phrases.glyph(plan)}"[:160]
    )
    link = f"{reverse('planner')}?{asked.query()}"
    services.plan_save(
        by=request.user,
        name=name,
        line=line,
        link=link if len(link) <= 2000 else "",
        devices=selectors.own_devices(user=request.user),
    )
    return redirect_with_message(request, f"{name} is kept under Saved plans.", "planner-saved")


@page
@require_POST
def forget(request: PageRequest, id: int) -> HttpResponse:
    row = selectors.saved_plan_get(user=request.user, id=id)
    services.plan_delete(plan=row, by=request.user)
    return redirect("planner-saved")


def _link(line: Mapping[str, Any]) -> str:
    """Of a plan that was kept by REST; empty where the page cannot show it."""
    asked, plan = line.get("workload") or {}, dict(line.get("plan") or {})
    plan["global_batch_size"] = plan.get("global_batch_size") or asked.get("global_batch_size")
    if not plan["global_batch_size"]:
        return ""
    spec = {"model": line.get("model"), "train": {"seq_len": asked.get("seq_len")}}
    query = planner_query(spec, {"plan": plan, "prediction": {"cluster": line.get("cluster")}})
    more = {"tokens": asked.get("tokens"), "framework": (line.get("framework") or {}).get("name")}
    told = urlencode({name: value for name, value in more.items() if value})
    return f"{reverse('planner')}?{query}&{told}" if query else ""
