"""Performance tab: where a step's time goes, and which ranks are slower than the rest."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.telemetry import selectors as telemetry
from webui.charts import panels
from webui.charts.spread import spread
from webui.run_facts import Facts
from webui.tabs import predicted
from webui.views.planner_pipeline import pipeline_of_run

PER_RANK = ("step_time_s", "data_time_s", "comm/exposed_s", "tokens_per_s", "mfu")


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    found = telemetry.latest_by_rank(run=facts.run)
    return {
        "panels": [
            panel.to_dict() for panel in predicted.with_levels(panels.performance(facts.names), facts.run.prediction)
        ],
        "predicted": predicted.content(facts, memory=False),
        "pipeline": pipeline_of_run(facts.run),
        "spread": spread(found, [name for name in PER_RANK if name in facts.latest]),
        "source": facts.source(),
    }
