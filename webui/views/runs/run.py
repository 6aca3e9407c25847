"""Run page: reads the run once, then the data of the open tab; `pulse` returns live updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.utils.translation import gettext as _

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import invalid
from orchestrator.sweeps import selectors as sweeps
from webui.presentation import run_facts
from webui.tabs import (
    answers,
    benchmark,
    chat,
    checkpoints,
    code,
    config,
    dashboards,
    evaluation,
    failure,
    heats,
    history,
    inference_engine,
    lineage,
    logs,
    media,
    memory,
    numerics,
    performance,
    plan_trials,
    predicted,
    produced,
    rollouts,
    samples,
    summary,
    system,
    training_data,
)
from webui.views.access import has_role, page

# tab -> function that returns its context; `Facts.tabs` omits tabs without content
TABS: dict[str, Callable[[run_facts.Facts, HttpRequest], dict[str, Any]]] = {
    "benchmark": benchmark.content,
    "chat": chat.content,
    "answers": answers.content,
    "produced": produced.content,
    "evaluation": evaluation.content,
    "summary": summary.content,
    "data": training_data.content,
    "requests": inference_engine.requests,
    "cache": inference_engine.cache,
    "trials": plan_trials.content,
    "performance": performance.content,
    "memory": memory.content,
    "media": media.content,
    "numerics": numerics.content,
    "system": system.content,
    "dashboards": dashboards.content,
    "logs": logs.content,
    "checkpoints": checkpoints.content,
    "lineage": lineage.content,
    "code": code.content,
    "config": config.content,
    "history": history.content,
}

_FIRST_CURVES: Final = 4


@page
def run(request: HttpRequest, id: int) -> HttpResponse:
    """Show the run page with one tab."""
    facts = run_facts.read(user=request.user, id=id)
    tabs = facts.tabs()
    first = tabs[0][0]
    requested = request.GET.get("tab", first)
    tab = requested if requested in {name for name, title in tabs} else first
    context = {
        **facts.head(),
        **TABS[tab](facts, request),
        "tab": tab,
        "tabs": tabs,
        "failure": failure.failure(facts) if tab == first else None,
        "addable": has_role(facts.user, Role.SUBMITTER),
        # one query more than the other tabs can afford
        "trial": sweeps.trial_of(facts.run) if tab == first else None,
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
    }
    context["first_curves"] = _first_curves(context, request)
    return render(request, f"webui/run/{tab}.html", context)


def _first_curves(context: dict[str, Any], request: HttpRequest) -> str:
    """The address of the first charts' curves, which the browser fetches before any script runs.

    `charts.js` takes the curves from it, by `source.first`; empty if the page has no such charts.
    """
    source = context.get("source")
    if source is None:  # a tab without charts
        return ""
    lines = (
        line["name"]
        for panel in context.get("panels") or ()
        if panel["rank"] is None
        for line in panel["series"]
    )
    names = list(dict.fromkeys(lines))[:_FIRST_CURVES]
    if not names or request.GET.get("x", source["axis"]) != source["axis"]:
        return ""
    query = {"x": source["axis"], "points": 1200, "digits": 7, "name": names}
    url = f"{source['curves_url']}?{urlencode(query, doseq=True)}"
    source["first"] = {"url": url, "names": names}
    return url


@page
def comparison(request: HttpRequest, id: int) -> HttpResponse:
    """Render the predicted vs measured part of the page."""
    facts = run_facts.read(user=request.user, id=id)
    rows = predicted.content(facts, memory=request.GET.get("part") == "memory", measured=True)
    context = {"predicted": rows, "run": facts.run, "may_manage": facts.may_manage}
    return render(request, "webui/run/predicted.html", context)


@page
def heat(request: HttpRequest, id: int) -> HttpResponse:
    """Render one heat map, which the page requests after loading."""
    facts = run_facts.read(user=request.user, id=id)
    card = heats.content(facts, request)
    if card is None:
        raise invalid(
            "of",
            _("%(name)r is not a heat map") % {"name": request.GET.get("of", "")},
            _("Use one of %(names)s.") % {"names": ", ".join(heats.MAPS)},
        )
    return render(request, "webui/run/heat.html", {"card": card, "run": facts.run})


@page
def sample_texts(request: HttpRequest, id: int) -> HttpResponse:
    """Render the sample texts of the model's checkpoints."""
    facts = run_facts.read(user=request.user, id=id)
    return render(
        request, "webui/run/samples.html", {"samples": samples.content(facts), "run": facts.run}
    )


@page
def rollout_groups(request: HttpRequest, id: int) -> HttpResponse:
    """Render sampled answers of one iteration with their rewards."""
    facts = run_facts.read(user=request.user, id=id)
    context = {"rollouts": rollouts.content(facts, request), "run": facts.run}
    return render(request, "webui/run/rollouts.html", context)


@page
def timeline(request: HttpRequest, id: int) -> HttpResponse:
    """Render the newest sampled pipeline step; 204 without one."""
    facts = run_facts.read(user=request.user, id=id)
    timeline = performance.timeline(facts)["timeline"]
    if timeline is None:
        return HttpResponse(status=204)
    return render(request, "webui/run/timeline.html", {"timeline": timeline, "run": facts.run})


@page
def pulse(request: HttpRequest, id: int) -> HttpResponse:
    """Return the headline, its parts as markup, and the chart marks of an open page."""
    facts = run_facts.read(user=request.user, id=id)
    head = facts.head(trending=True)
    parts = {
        "state": render_to_string("webui/run/state.html", head, request),
        "actions": render_to_string("webui/run/actions.html", head, request),
        "events": render_to_string("webui/run/events.html", head, request),
    }
    answer = {
        "run_state": facts.run.state,
        "sentence": head["sentence"],
        "part": head["progress"],
        "parts": parts,
        "marks": head["marks"],
    }
    return JsonResponse(answer)
