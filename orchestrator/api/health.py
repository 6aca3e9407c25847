"""/health/: liveness of scheduler, Redis, ingest and nodes, open to everyone. Names no run.

503 if a component that everything depends on is dead.
"""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from orchestrator.api.http.responses import json_response
from orchestrator.scheduling import selectors


@require_safe
def health(request: HttpRequest) -> HttpResponse:
    """JSON unless the caller prefers HTML, as browsers do."""
    try:
        facts: dict[str, Any] = selectors.health()
    except DatabaseError as error:
        facts = {
            "ok": False,
            "troubles": [f"the database does not answer ({type(error).__name__})"],
        }
        return json_response(facts, status=503, headers={"Cache-Control": "no-store"})
    status = 200 if facts["ok"] else 503
    if request.get_preferred_type(["application/json", "text/html"]) == "text/html":
        response = render(request, "webui/health.html", {"health": facts, **facts}, status=status)
    else:
        response = json_response(facts, status=status)
    response["Cache-Control"] = "no-store"
    return response
