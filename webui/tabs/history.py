"""History tab: attempts, state changes and audit log of a run."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.translation import ngettext

from orchestrator.accounts import selectors as accounts
from orchestrator.runs import selectors as runs
from webui.presentation import formatting
from webui.presentation.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    run, user = facts.run, facts.user
    return {
        "attempts": [row(attempt) for attempt in runs.attempts_of(run=run)[:50]],
        "all_events": facts.events,
        "forks": runs.forks_of(run=run, user=user),
        "forked_at": runs.forked_at(run) if run.forked_from_id else None,
        "audit": list(accounts.audit_entries(user=user).filter(target=f"run:{run.pk}")[:50]),
        "source": facts.source(),
    }


def row(attempt: Any) -> dict[str, Any]:
    """Return an attempt with its placement and duration as text."""
    started, ended = attempt.started or attempt.created, attempt.ended
    shares = [
        ngettext(
            "%(node)s (%(count)s device)", "%(node)s (%(count)s devices)", len(share["devices"])
        )
        % {"node": share["node"], "count": len(share["devices"])}
        for share in attempt.placement
    ]
    duration = formatting.duration((ended - started).total_seconds()) if ended else ""
    return {"attempt": attempt, "where": formatting.listed(shares), "duration": duration}
