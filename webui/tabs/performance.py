"""Performance tab: step time breakdown, communication, pipeline timeline and slow ranks."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.telemetry import selectors as telemetry
from webui.charts import measured_communication, measured_pipeline, run_charts
from webui.charts.spread import spread
from webui.planner.charts.pipeline import pipeline
from webui.planner.pipeline_view import timeline_of_run
from webui.presentation.run_facts import Facts
from webui.tabs import heats, kernels, predicted, whole_run

PER_RANK = ("step_time_s", "data_time_s", "comm/exposed_s", "tokens_per_s", "mfu")
_SHOWN_STALLS: Final = 4  # listed above the charts
# sampled steps to read: some ranks may not have reported the newest yet
_STEPS: Final = 3


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    latest = telemetry.latest_by_rank(run=facts.run)
    return {
        "panels": [
            panel.to_dict()
            for panel in predicted.with_levels(
                run_charts.performance(facts.names), facts.run.prediction
            )
        ],
        "predicted": predicted.content(facts, memory=False),
        "whole_run": whole_run.content(facts.run.prediction),
        **timeline(facts),
        "calls": measured_communication.calls(
            facts.latest, (facts.run.prediction or {}).get("collectives")
        ),
        "stalls": [event for event in facts.events if event.type in heats.STALLS][:_SHOWN_STALLS],
        "heats": heats.available(facts, ("skew",)),
        "spread": spread(latest, [name for name in PER_RANK if name in facts.latest]),
        "kernels": kernels.content(facts),
        "source": facts.source(),
    }


def timeline(facts: Facts) -> dict[str, Any]:
    """Return `{timeline, pipeline}`: a sampled step vs prediction, else the latter."""
    stages = int(facts.plan.get("pp") or 1)
    if stages < 2:
        return {"timeline": None, "pipeline": None}
    events = runs.events_of(
        run=facts.run, types=["pipeline_timeline"], limit=_STEPS * stages, newest=True
    )
    predicted_timeline = timeline_of_run(facts.run, whole=bool(events))
    measured = measured_pipeline.compare([event.data for event in events], predicted_timeline)
    return {
        "timeline": measured,
        "pipeline": pipeline(predicted_timeline)
        if predicted_timeline and measured is None
        else None,
    }
