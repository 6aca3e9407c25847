"""History tab: attempts, every state move, and who did what."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.accounts import selectors as accounts
from orchestrator.runs import selectors as runs
from webui import words
from webui.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    run = facts.run
    attempts = list(runs.attempts_of(run=run)[:50])
    for attempt in attempts:
        began, ended = attempt.started or attempt.created, attempt.ended
        attempt.took = words.duration((ended - began).total_seconds()) if ended else ""
        attempt.where = words.listed(
            [f"{share['node']} ({words.count(len(share['devices']), 'device')})" for share in attempt.placement]
        )
    return {
        "attempts": attempts,
        "all_moments": facts.moments,
        "audit": list(accounts.audit_entries(user=request.user).filter(target=f"run:{run.pk}")[:50]),
        "source": facts.source(),
    }
