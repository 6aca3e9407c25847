"""Numerics tab: does the precision hold, do gradients reach every layer, are experts in balance?"""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from webui.charts import panels
from webui.charts.numerics import numerics_sentence
from webui.presentation import event_messages
from webui.presentation.run_facts import Facts
from webui.tabs import heats

EVENTS: Final = ("loss_scale_changed", "overflow_skipped_step", "non_finite")
_READ: Final = 1000  # newest, counted for the sentence
_SHOWN: Final = 60


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    events = runs.events_of(run=facts.run, types=EVENTS, limit=_READ, newest=True)
    found = [event_messages.moment(event) for event in reversed(events)]
    return {
        "panels": [panel.to_dict() for panel in panels.numerics(facts.names)],
        "says": numerics_sentence(
            [(event.type, event.data) for event in events],
            facts.latest,
            precision=str(facts.plan.get("precision") or ""),
            full=len(events) == _READ,
        ),
        "odd": next((moment for moment in found if moment.type == "non_finite"), None),
        "told": found[:_SHOWN],
        "told_of": len(found),
        "heats": heats.offered(facts, ("gradients", "weights", "underflow", "loads", "experts")),
        "source": facts.source(),
    }
