"""What is down, shown on every page, and the answer of all paths while the database is down."""

from __future__ import annotations

import sys
import time

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from orchestrator.api.http import problems
from orchestrator.scheduling import selectors
from webui.views.access import PageRequest, page

_LIFE_S = 5.0  # pages share one reading per process
_newest: tuple[float, list[str]] = (-_LIFE_S, [])


@page
@require_GET
def outages(request: PageRequest) -> HttpResponse:
    """The part of each page that names what is down; pages fetch it again every 15 s."""
    return render(request, "webui/parts/outages.html", {"troubles": troubles()})


def troubles() -> list[str]:
    """Sentences about each component and node that is down, at most some seconds old."""
    global _newest
    read, sentences = _newest
    if time.monotonic() - read >= _LIFE_S:
        sentences = selectors.health()["troubles"]
        _newest = time.monotonic(), sentences
    return sentences


def server_error(request: HttpRequest) -> HttpResponse:
    """503 while the database does not answer, else 500; reads nothing from the database."""
    down = problems.database_is_down(sys.exc_info()[1])
    if down:
        title = _("The database does not answer")
        detail = _("Runs continue, and nodes store what they report. Try again in a minute.")
    else:
        title = _("Internal error")
        detail = _("The error is in the log of the web process.")
    text = render_to_string("webui/server_error.html", {"title": title, "detail": detail})
    answer = HttpResponse(text, status=503 if down else 500)
    if down:
        answer["Retry-After"] = "10"
    answer["Cache-Control"] = "no-store"
    return answer


def busy_page() -> str:
    """The page of a request that a busy web process refuses; reads nothing from the database."""
    detail = _(
        "All threads of this web process are in use and too many requests wait. Nothing was "
        "changed. Try again in a few seconds."
    )
    return render_to_string(
        "webui/server_error.html", {"title": _("The server is busy"), "detail": detail}
    )
