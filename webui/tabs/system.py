"""System tab: how busy, hot and hungry the devices are; of runs that answer, which kernels run on
them.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from webui.charts import panels
from webui.presentation.run_facts import ANSWERING, Facts
from webui.tabs import kernels


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    return {
        "panels": [panel.to_dict() for panel in panels.system(facts.names)],
        "kernels": kernels.content(facts) if facts.run.kind in ANSWERING else None,
        "source": facts.source(),
    }
