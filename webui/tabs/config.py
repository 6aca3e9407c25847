"""Config tab: the submitted spec, the resolved plan and the placement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _

from orchestrator.runs import selectors as runs
from webui.planner.result_layout import PLAN_ROWS
from webui.presentation.run_facts import Facts
from webui.tabs.recorded import recorded_parts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    run = facts.run
    newest = runs.attempts_of(run=run).first()
    return {
        "spec_json": json.dumps(run.spec, indent=2, ensure_ascii=False),
        "plan_rows": plan_rows(run.plan or {}),
        "placement": newest.placement if newest else [],
        "recorded": recorded_parts(facts.details),
        "source": facts.source(),
    }


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and value of each plan field; fields without a label come last."""
    labels = {name: _(label) for name, label in PLAN_ROWS}
    named = [name for name in labels if name in plan]
    rest = sorted(set(plan) - set(labels))
    return [
        (labels.get(name) or name.replace("_", " "), _text(plan[name]))
        for name in (*named, *rest)
        if plan[name] is not None
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.15g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
