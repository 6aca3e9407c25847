"""Polled parts of a serve run's page: requests, cache and phase."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.translation import gettext as _

from orchestrator.common.errors import invalid
from webui.presentation import run_facts
from webui.tabs import adapters, chat, inference_engine
from webui.views.access import page

PARTS = {
    "requests": inference_engine.requests,
    "cache": inference_engine.cache,
    "adapters": adapters.content,
}


@page
def part(request: HttpRequest, id: int, name: str) -> HttpResponse:
    """Render one live part of the page; `phase` returns JSON."""
    facts = run_facts.read(user=request.user, id=id)
    if facts.run.kind != "serve" or name not in (*PARTS, "phase"):
        raise invalid(
            "part",
            _("run %(id)s has no live part %(name)r") % {"id": id, "name": name},
            _("Use requests, cache or adapters of a serve run."),
        )
    if name == "phase":
        return JsonResponse(chat.phase(facts))
    return render(
        request, f"webui/run/{name}_part.html", {"run": facts.run, **PARTS[name](facts, request)}
    )
