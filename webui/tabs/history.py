"""History tab: attempts, state changes and audit log of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.accounts import selectors as accounts
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from webui.presentation import device_time, formatting
from webui.presentation.run_facts import Facts
from webui.tabs.sizes import sizes_card

_MOODS: Final = {"ok": "good", "cancelled": "warn", "preempted": "warn"}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    run, user = facts.run, facts.user
    total, attempts = scheduling.device_time_of_run(run)
    elastic = facts.elastic
    return {
        "sizes": sizes_card([attempt for attempt, _spent in attempts], elastic)
        if elastic
        else None,
        "attempts": [
            row(attempt) | {"device_time": device_time.bar(spent)}
            for attempt, spent in attempts[:50]
        ],
        "device_time": device_time.bar(total),
        "all_events": facts.events,
        "forks": runs.forks_of(run=run, user=user),
        "forked_at": runs.forked_at(run) if run.forked_from_id else None,
        "audit": list(accounts.audit_entries(user=user).filter(target=f"run:{run.pk}")[:50]),
        "source": facts.source(),
    }


def place_name(share: Mapping[str, Any]) -> str:
    """The node of a part of an attempt; in another engine its host there, once it has one."""
    if "engine" not in share:
        return str(share["node"])
    if host := share.get("host"):
        return _("%(host)s of %(engine)s") % {"host": host, "engine": share["engine"]}
    return _("a node of %(engine)s") % {"engine": share["engine"]}


def row(attempt: Any) -> dict[str, Any]:
    """Return an attempt with its placement and duration as text."""
    started, ended = attempt.started or attempt.created, attempt.ended
    shares = [
        ngettext(
            "%(node)s (%(count)s device)", "%(node)s (%(count)s devices)", len(share["devices"])
        )
        % {"node": place_name(share), "count": len(share["devices"])}
        for share in attempt.placement
    ]
    duration = formatting.duration((ended - started).total_seconds()) if ended else ""
    paused = attempt.exit_class == "preempted" and attempt.requested == "pause"
    resized = attempt.exit_class == "preempted" and attempt.resize
    name = "paused" if paused else "resized" if resized else attempt.exit_class.replace("_", " ")
    return {
        "attempt": attempt,
        "exit": name,
        "mood": "" if paused or resized else _MOODS.get(attempt.exit_class, "bad"),
        "where": formatting.listed(shares),
        "duration": duration,
    }
