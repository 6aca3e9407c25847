"""Numerics tab: overflows, gradient and weight norms per layer, expert balance."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from webui.charts import run_charts
from webui.charts.numerics import summarize_numerics
from webui.presentation import event_messages
from webui.presentation.run_facts import Facts
from webui.tabs import heats

EVENTS: Final = ("loss_scale_changed", "overflow_skipped_step", "non_finite")
_READ: Final = 1000  # newest events that the summary counts
_SHOWN: Final = 60


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    rows = runs.events_of(run=facts.run, types=EVENTS, limit=_READ, newest=True)
    events = [event_messages.event_message(row) for row in reversed(rows)]
    return {
        "panels": [panel.to_dict() for panel in run_charts.numerics(facts.names)],
        "summary": summarize_numerics(
            [(row.type, row.data) for row in rows],
            facts.latest,
            precision=str(facts.plan.get("precision") or ""),
            truncated=len(rows) == _READ,
        ),
        "non_finite": next((event for event in events if event.type == "non_finite"), None),
        "events": events[:_SHOWN],
        "event_count": len(events),
        "heats": heats.available(facts, ("gradients", "weights", "underflow", "loads", "experts")),
        "source": facts.source(),
    }
