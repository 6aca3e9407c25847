"""Config tab: the submitted spec, the resolved plan and the placement."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from webui.presentation.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    run = facts.run
    newest = runs.attempts_of(run=run).first()
    return {
        "spec_json": json.dumps(run.spec, indent=2, ensure_ascii=False),
        "plan_rows": sorted((run.plan or {}).items()),
        "placement": newest.placement if newest else [],
        "source": facts.source(),
    }
