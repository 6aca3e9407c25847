"""A run's page: reads the run once, then what the open tab shows.

`pulse` is what changes while one looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.templatetags.static import static

from orchestrator.common.errors import invalid
from webui.presentation import run_facts
from webui.tabs import (
    answers,
    benchmark,
    chat,
    checkpoints,
    config,
    engine,
    evaluation,
    heats,
    history,
    logs,
    memory,
    numerics,
    performance,
    predicted,
    samples,
    summary,
    system,
)
from webui.views.access import page

# tab → what it adds to the page; a tab without anything to show is left out by `run_facts.tabs`
TABS: dict[str, Callable[[run_facts.Facts, HttpRequest], dict[str, Any]]] = {
    "benchmark": benchmark.content,
    "chat": chat.content,
    "answers": answers.content,
    "evaluation": evaluation.content,
    "summary": summary.content,
    "requests": engine.requests,
    "cache": engine.cache,
    "performance": performance.content,
    "memory": memory.content,
    "numerics": numerics.content,
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
    first = tabs[0][0]
    wanted = request.GET.get("tab", first)
    tab = wanted if wanted in {name for name, _ in tabs} else first
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
def heat(request: HttpRequest, id: int) -> HttpResponse:
    """One heat map as a part of the page, which asks for it once it stands."""
    facts = run_facts.read(user=request.user, id=id)
    shown = heats.content(facts, request)
    if shown is None:
        raise invalid(
            "of", f"{request.GET.get('of', '')!r} is not a heat map", ", ".join(heats.MAPS)
        )
    return render(request, "webui/run/heat.html", {"shown": shown, "run": facts.run})


@page
def texts(request: HttpRequest, id: int) -> HttpResponse:
    """What the model wrote at its checkpoints as a part of the page."""
    facts = run_facts.read(user=request.user, id=id)
    return render(
        request, "webui/run/samples.html", {"samples": samples.content(facts), "run": facts.run}
    )


@page
def timeline(request: HttpRequest, id: int) -> HttpResponse:
    """The newest sampled step of the pipeline as a part of the page; nothing (204) where none is
    sampled.
    """
    facts = run_facts.read(user=request.user, id=id)
    found = performance.timeline(facts)["timeline"]
    if found is None:
        return HttpResponse(status=204)
    return render(request, "webui/run/timeline.html", {"timeline": found, "run": facts.run})


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
