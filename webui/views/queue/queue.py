"""Queue page: waiting runs with reasons and estimated starts; sets priorities."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common import live
from orchestrator.common.errors import invalid
from orchestrator.runs import selectors as runs
from orchestrator.runs import services
from orchestrator.scheduling import selectors
from orchestrator.scheduling.preemption import history
from webui.presentation import formatting
from webui.views.access import PageRequest, page, redirect_with_message

PREEMPTIONS = 10
SHOWN = 50  # runs on a page; a row takes 0.35 ms of CPU time


@page
@require_GET
def queue(request: PageRequest) -> HttpResponse:
    """Show the queue, or only its rows for an htmx request."""
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    text = request.GET.get("after", "")
    after = int(text) if text.isdecimal() and len(text) < 10 else 0
    listed = selectors.queue_page(user=request.user, limit=SHOWN, after=after)
    rows = [
        {"entry": entry, "may_manage": services.may_manage(entry.run, request.user)}
        for entry in listed.entries
    ]
    context = {
        "rows": rows,
        "after": after,
        "last": listed.entries[-1].position if listed.entries else 0,
        "more": listed.more,
        "sentence": sentence(listed, first=None if after else next(iter(listed.entries), None)),
        "preemptions": [] if request.htmx else history.recent(user=request.user, limit=PREEMPTIONS),
        "decision_age_s": selectors.decision_age_s(),
        "head": {"epoch": epoch, "seq": seq},
    }
    if request.htmx:
        return render(request, "webui/queue_rows.html", context)
    return render(request, "webui/queue.html", context)


@page
@require_POST
def priority(request: PageRequest, id: int) -> HttpResponse:
    """Set a run's priority."""
    run = runs.run_get(user=request.user, id=id)
    text = request.POST.get("priority", "").strip()
    try:
        value = int(text)
    except ValueError:
        raise invalid(
            "priority",
            _("%(value)r is not an integer") % {"value": text},
            _("Use 0, or a higher number."),
        ) from None
    services.run_update(run=run, by=request.user, priority=value)
    if request.htmx:
        return redirect("queue")
    return redirect_with_message(
        request,
        _("Run %(id)s now has priority %(value)s.") % {"id": run.pk, "value": value},
        "queue",
    )


def sentence(listed: Any, *, first: Any) -> str:
    """Summarize the queue in one sentence; `first` is the entry that starts next, if shown."""
    if not listed.runs:
        return _("No runs are waiting; a new run starts as soon as its devices are free.")
    runs_text = ngettext("%(count)s run waits", "%(count)s runs wait", listed.runs) % {
        "count": f"{listed.runs:,}"
    }
    text = runs_text + ngettext(
        " for %(count)s device in total", " for %(count)s devices in total", listed.devices
    ) % {"count": f"{listed.devices:,}"}
    if first is not None and first.may_start is not None:
        wait = (first.may_start - timezone.now()).total_seconds()
        when = _("now") if wait < 5 else _("in %(time)s") % {"time": formatting.remaining(wait)}
        text += _("; the next may start %(when)s") % {"when": when}
    return text + "."
