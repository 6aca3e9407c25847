"""Checkpoints and artifacts tab: what the run saved, with fork and rewind."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.runs.store import access, copies
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    rows = list(runs.checkpoints_of(run=facts.run, retained=False)[:200])
    has_store = access.configured()
    available = [row.step for row in rows if _usable(row, has_store)]
    return {
        "checkpoints": rows,
        "usable": [row.pk for row in rows if _usable(row, has_store)],
        "available": available,
        "rewindable": facts.may_manage
        and (facts.run.state in ENDED or facts.run.state == "paused"),
        "steps": (facts.run.spec.get("train") or {}).get("steps") or 0,
        "forks": runs.forks_of(run=facts.run, user=facts.user),
        "artifacts": list(runs.artifacts_of(run=facts.run)[:200]),
        "copies_made": has_store,
        "problem": copies.problem_of(runs.nodes_of(run=facts.run)) if has_store else None,
        "source": facts.source(),
    }


def _usable(row: Any, has_store: bool) -> bool:
    """Whether a run can continue from it: on disk, or from the store."""
    return row.deleted is None or (has_store and row.copy is not None and row.copy.deleted is None)
