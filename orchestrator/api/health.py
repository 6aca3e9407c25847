"""/health/: liveness of scheduler, Redis, ingest and nodes. Names no run.

Open to everyone, with details only for users and tokens with the scope `read`: others see
whether the installation works, nothing about it.

503 if a component that everything depends on is dead.
"""

from __future__ import annotations

import logging
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from orchestrator.accounts import selectors as accounts
from orchestrator.api.http.responses import json_response
from orchestrator.scheduling import selectors

log = logging.getLogger(__name__)


@require_safe
def health(request: HttpRequest) -> HttpResponse:
    """JSON unless the caller prefers HTML, as browsers do."""
    try:
        detailed = _may_read(request)
        facts: dict[str, Any] = selectors.health()
    except (DatabaseError, InterfaceError) as error:
        log.error("the database does not answer: %s", error)
        facts = {"ok": False, "troubles": ["the database does not answer"]}
        return json_response(facts, status=503, headers={"Cache-Control": "no-store"})
    status = 200 if facts["ok"] else 503
    if not detailed:
        facts = {"ok": facts["ok"]}
    if request.get_preferred_type(["application/json", "text/html"]) == "text/html":
        response = render(
            request,
            "webui/health.html",
            {"health": facts, "detailed": detailed, **facts},
            status=status,
        )
    else:
        response = json_response(facts, status=status)
    response["Cache-Control"] = "no-store"
    return response


def _may_read(request: HttpRequest) -> bool:
    if request.user.is_authenticated:
        return True
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    result = accounts.token_user(text.strip()) if scheme.lower() == "bearer" else None
    return result is not None and "read" in accounts.token_scopes(*result)
