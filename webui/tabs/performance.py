"""Performance tab: where a step's time goes, what ranks send, how the pipeline runs, who holds the
others up.
"""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.telemetry import selectors as telemetry
from webui.charts import measured_communication, measured_pipeline, panels
from webui.charts.spread import spread
from webui.planner.charts.pipeline import pipeline
from webui.planner.pipeline_view import timeline_of_run
from webui.presentation.run_facts import Facts
from webui.tabs import heats, kernels, predicted

PER_RANK = ("step_time_s", "data_time_s", "comm/exposed_s", "tokens_per_s", "mfu")
_TOLD: Final = 4  # stalls in words above the charts
# sampled steps that are read: of the newest, some ranks may still be on their way
_STEPS: Final = 3


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    found = telemetry.latest_by_rank(run=facts.run)
    return {
        "panels": [
            panel.to_dict()
            for panel in predicted.with_levels(
                panels.performance(facts.names), facts.run.prediction
            )
        ],
        "predicted": predicted.content(facts, memory=False),
        **timeline(facts),
        "calls": measured_communication.calls(
            facts.latest, (facts.run.prediction or {}).get("collectives")
        ),
        "stalls": [moment for moment in facts.moments if moment.type in heats.STALLS][:_TOLD],
        "heats": heats.offered(facts, ("skew",)),
        "spread": spread(found, [name for name in PER_RANK if name in facts.latest]),
        "kernels": kernels.content(facts),
        "source": facts.source(),
    }


def timeline(facts: Facts) -> dict[str, Any]:
    """`{timeline, pipeline}`: a sampled step above its prediction, or the prediction alone before
    one is sampled.
    """
    stages = int(facts.plan.get("pp") or 1)
    if stages < 2:
        return {"timeline": None, "pipeline": None}
    told = runs.events_of(
        run=facts.run, types=["pipeline_timeline"], limit=_STEPS * stages, newest=True
    )
    foreseen = timeline_of_run(facts.run, whole=bool(told))
    found = measured_pipeline.beside([event.data for event in told], foreseen)
    return {
        "timeline": found,
        "pipeline": pipeline(foreseen) if foreseen and found is None else None,
    }
