"""System tab: how busy, hot and hungry the devices are."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from webui.charts import panels
from webui.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    return {"panels": [panel.to_dict() for panel in panels.system(facts.names)], "source": facts.source()}
