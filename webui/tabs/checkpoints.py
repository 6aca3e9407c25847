"""Checkpoints and artifacts tab: what the run has saved and left behind."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from webui.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    return {
        "checkpoints": list(runs.checkpoints_of(run=facts.run, kept=False)[:200]),
        "artifacts": list(runs.artifacts_of(run=facts.run)[:200]),
        "source": facts.source(),
    }
