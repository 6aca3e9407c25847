"""Parts of a serve run's page that change by the second: its requests, its cache, whether it serves
yet.
"""

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
    facts = run_facts.read(user=request.user, id=id)
    if facts.run.kind != "serve" or name not in (*PARTS, "phase"):
        raise invalid(
            "part", f"run {id} has no {name!r} that moves", "a serve run's requests or cache"
        )
    if name == "phase":
        return JsonResponse(chat.phase(facts))
    return render(
        request, f"webui/run/{name}_part.html", {"run": facts.run, **PARTS[name](facts, request)}
    )
