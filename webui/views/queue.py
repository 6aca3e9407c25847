"""The queue: who waits for what, why, and when it may start.

Decides nothing; priority is changed by a service.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common import live
from orchestrator.common.errors import invalid
from orchestrator.runs import selectors as runs
from orchestrator.runs import services
from orchestrator.scheduling import selectors
from webui.presentation import formatting
from webui.views.access import PageRequest, done, page


@page
@require_GET
def queue(request: PageRequest) -> HttpResponse:
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    entries = selectors.queue_visible_to(user=request.user)
    rows = [
        {"entry": entry, "mine": services.may_manage(entry.run, request.user)} for entry in entries
    ]
    context = {"rows": rows, "sentence": sentence(entries), "head": {"epoch": epoch, "seq": seq}}
    if request.htmx:
        return render(request, "webui/queue_rows.html", context)
    return render(request, "webui/queue.html", context)


@page
@require_POST
def priority(request: PageRequest, id: int) -> HttpResponse:
    run = runs.run_get(user=request.user, id=id)
    text = request.POST.get("priority", "").strip()
    try:
        value = int(text)
    except ValueError:
        raise invalid(
            "priority", f"{text!r} is not a whole number", "0, or more to go first"
        ) from None
    services.run_update(run=run, by=request.user, priority=value)
    if request.htmx:
        return redirect("queue")
    return done(request, f"Run {run.pk} has priority {value} now.", "queue")


def sentence(entries: list[Any]) -> str:
    if not entries:
        return "Nobody waits; a run that is submitted now starts as soon as its devices are free."
    first = entries[0]
    devices = sum(entry.run.devices for entry in entries)
    text = (
        f"{formatting.count(len(entries), 'run waits', 'runs wait')} for "
        f"{formatting.count(devices, 'device')} in all"
    )
    if first.may_start is not None:
        wait = (first.may_start - timezone.now()).total_seconds()
        text += f"; the next may start {'any moment' if wait < 5 else 'in ' + formatting.duration(wait)}"
    return text + "."
