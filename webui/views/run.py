"""A run's page: reads the run once, then what the open tab shows. `pulse` is what changes while one looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.templatetags.static import static

from webui import run_facts
from webui.tabs import checkpoints, config, history, logs, memory, performance, predicted, summary, system
from webui.views.door import page

# tab → what it adds to the page; a tab without anything to show is left out by `run_facts.tabs`
TABS: dict[str, Callable[[run_facts.Facts, HttpRequest], dict[str, Any]]] = {
    "summary": summary.content,
    "performance": performance.content,
    "memory": memory.content,
    "system": system.content,
    "logs": logs.content,
    "checkpoints": checkpoints.content,
    "config": config.content,
    "history": history.content,
}


@page
def run(request: HttpRequest, id: int) -> HttpResponse:
    facts = run_facts.read(user=request.user, id=id)
    tabs = facts.tabs()
    wanted = request.GET.get("tab", "summary")
    tab = wanted if wanted in {name for name, _ in tabs} else "summary"
    context = {
        **facts.head(),
        **TABS[tab](facts, request),
        "tab": tab,
        "tabs": tabs,
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
    }
    return render(request, f"webui/run/{tab}.html", context)


@page
def beside(request: HttpRequest, id: int) -> HttpResponse:
    """The prediction beside what is measured by now, as a part of the page."""
    facts = run_facts.read(user=request.user, id=id)
    found = predicted.content(facts, memory=request.GET.get("part") == "memory", measured=True)
    context = {"predicted": found, "run": facts.run, "may_manage": facts.may_manage}
    return render(request, "webui/run/predicted.html", context)


@page
def pulse(request: HttpRequest, id: int) -> HttpResponse:
    """The headline's parts as markup, and the marks on charts, for a page that is open."""
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
