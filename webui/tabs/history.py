"""History tab: attempts, every state move, and who did what."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.accounts import selectors as accounts
from orchestrator.runs import selectors as runs
from webui.presentation import formatting
from webui.presentation.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    run, user = facts.run, facts.user
    return {
        "attempts": [row(attempt) for attempt in runs.attempts_of(run=run)[:50]],
        "all_moments": facts.moments,
        "forks": runs.forks_of(run=run, user=user),
        "forked_at": runs.forked_at(run) if run.forked_from_id else None,
        "audit": list(accounts.audit_entries(user=user).filter(target=f"run:{run.pk}")[:50]),
        "source": facts.source(),
    }


def row(attempt: Any) -> dict[str, Any]:
    """An attempt with where it ran and how long, in words."""
    began, ended = attempt.started or attempt.created, attempt.ended
    shares = [
        f"{share['node']} ({formatting.count(len(share['devices']), 'device')})"
        for share in attempt.placement
    ]
    took = formatting.duration((ended - began).total_seconds()) if ended else ""
    return {"attempt": attempt, "where": formatting.listed(shares), "took": took}
