"""Adapters card of a serve run: which are loaded, where each comes from, and a form."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import endpoint
from webui.presentation.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the context of the card; `slots` is 0 for a server that can load none."""
    status = facts.endpoint
    live = status is not None and status.phase == "serving"
    state = endpoint.engine_state(run=facts.run) if live else None
    rows = [
        {
            "adapter": adapter,
            "source": runs.run_of_file(user=facts.user, path=adapter.path),
        }
        for adapter in (state.adapters if state is not None else ())
    ]
    return {
        "adapters": rows,
        "slots": state.adapter_slots if state is not None else 0,
        "changes": facts.may_manage and live,
        "adapters_url": f"/serve/{facts.run.pk}/v1",
    }


def choices(facts: Facts) -> list[dict[str, str]]:
    """Return `{path, name}` of adapters that visible runs trained, for the form."""
    return [
        {"path": f"runs/{run.pk}/checkpoints", "name": f"{run.pk} · {run.name}"}
        for run in runs.adapter_runs(user=facts.user)
    ]
