"""Page of dead letters: messages that could not be processed, with retry and drop."""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.dead_letters import selectors, services
from webui.views.access import PageRequest, page, redirect_with_message, require_role

_SHOWN = 100
_STATES = ("open", "retried", "dropped")


@page
@require_GET
def dead_letters(request: PageRequest) -> HttpResponse:
    """Show the newest letters of a state."""
    require_role(request.user, Role.OPERATOR, _("The list of dead letters"))
    state = request.GET.get("state", "open")
    state = state if state in _STATES else "open"
    rows = selectors.dead_letters(by=request.user, state=state)
    total = rows.count()
    context = {
        "letters": list(rows[:_SHOWN]),
        "state": state,
        "states": [("open", _("Open")), ("retried", _("Retried")), ("dropped", _("Dropped"))],
        "total": total,
        "hidden": max(0, total - _SHOWN),
        "sentence": _sentence(sum(selectors.open_counts().values())),
    }
    return render(request, "webui/dead_letters.html", context)


@page
@require_POST
def close(request: PageRequest, id: int) -> HttpResponse:
    """Retry or drop a letter."""
    letter = selectors.dead_letter_get(by=request.user, id=id)
    if request.POST.get("action") == "retry":
        services.dead_letter_retry(letter=letter, by=request.user)
        text = _("The message is back in its stream. If it fails again, it returns here.")
    else:
        services.dead_letter_drop(letter=letter, by=request.user)
        text = _("The message is dropped.")
    return redirect_with_message(request, text, "dead-letters")


def _sentence(count: int) -> str:
    if not count:
        return _("All messages from nodes were processed.")
    return ngettext(
        "%(count)s message could not be processed. The others are not affected.",
        "%(count)s messages could not be processed. The others are not affected.",
        count,
    ) % {"count": count}
