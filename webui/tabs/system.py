"""System tab: device utilization, power and temperature; kernels of inference runs."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from webui.charts import run_charts
from webui.presentation.run_facts import ANSWERING, Facts
from webui.tabs import kernels


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    return {
        "panels": [panel.to_dict() for panel in run_charts.system(facts.names)],
        "kernels": kernels.content(facts) if facts.run.kind in ANSWERING else None,
        "source": facts.source(),
    }
