"""Polled parts of a serve run's page: requests, cache and phase."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from orchestrator.common.errors import invalid
from webui.presentation import run_facts
from webui.tabs import chat, engine
from webui.views.access import page

PARTS = {"requests": engine.requests, "cache": engine.cache}


@page
def part(request: HttpRequest, id: int, name: str) -> HttpResponse:
    """Render one live part of the page; `phase` returns JSON."""
    facts = run_facts.read(user=request.user, id=id)
    if facts.run.kind != "serve" or name not in (*PARTS, "phase"):
        raise invalid(
            "part", f"run {id} has no live part {name!r}", "a serve run's requests or cache"
        )
    if name == "phase":
        return JsonResponse(chat.phase(facts))
    return render(
        request, f"webui/run/{name}_part.html", {"run": facts.run, **PARTS[name](facts, request)}
    )
