"""Checkpoints and artifacts tab: what the run saved, with fork and rewind."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    rows = list(runs.checkpoints_of(run=facts.run, retained=False)[:200])
    available = [row.step for row in rows if row.deleted is None]
    return {
        "checkpoints": rows,
        "available": available,
        "rewindable": facts.may_manage
        and (facts.run.state in ENDED or facts.run.state == "paused"),
        "steps": (facts.run.spec.get("train") or {}).get("steps") or 0,
        "forks": runs.forks_of(run=facts.run, user=facts.user),
        "artifacts": list(runs.artifacts_of(run=facts.run)[:200]),
        "source": facts.source(),
    }
