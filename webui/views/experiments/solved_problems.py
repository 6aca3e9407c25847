"""Reinforcement learning on solved problems: a run of one minute next to exact answers."""

from __future__ import annotations

from typing import Any, Final

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.runs import selectors, services
from webui.charts import solved_problem_panels as topics
from webui.presentation import run_facts
from webui.views.access import PageRequest, has_role, page, redirect_with_message
from workers.contracts.catalog import solved_problems as problems

_RUNS = 20  # offered to look at
SPEC: Final[dict[str, Any]] = {
    "kind": "script",
    "script": {"command": ["-m", problems.MODULE]},
    "resources": {"devices": 1},
    "tags": [problems.TAG],
}


@page
@require_GET
def solved_problems(request: PageRequest) -> HttpResponse:
    """Show the run `run` of the URL, else the user's newest one, else the exact answers alone."""
    runs = selectors.run_list(user=request.user, kind="script", tag=problems.TAG, limit=_RUNS)
    wanted = request.GET.get("run", "")
    chosen: Any
    if wanted:
        chosen = selectors.run_get(user=request.user, id=wanted)
    else:
        own = [run for run in runs if run.owner_id == request.user.pk]
        chosen = next(iter(own or runs), None)
    facts = None if chosen is None else run_facts.facts_for(run=chosen, user=request.user)
    latest = {} if facts is None else facts.latest
    walk, bandit = topics.walk_topics(latest), topics.bandit_topics(latest)
    context: dict[str, Any] = {
        "walk": walk,
        "bandit": bandit,
        "runs": runs,
        "chosen": chosen,
        "digits": topics.DIGITS,
        "may_create": has_role(request.user, Role.SUBMITTER),
    }
    if facts is not None:
        context |= {
            **facts.head(),
            "panels": [each.panel.to_dict() for each in (*walk, *bandit)],
            "source": facts.source(),
            "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        }
    return render(request, "webui/solved_problems.html", context)


@page
@require_POST
def start(request: PageRequest) -> HttpResponse:
    """Submit the run and show it."""
    run = services.run_submit(owner=request.user, name=problems.TAG, spec=SPEC)
    return redirect_with_message(
        request, _("Run %(id)s submitted.") % {"id": run.pk}, "solved-problems"
    )
