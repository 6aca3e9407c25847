"""Memory tab: memory of a rank by category over time, and by rank."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _

from orchestrator.telemetry import selectors as telemetry
from webui.charts import run_charts, training_panels
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.tabs import predicted


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    by_rank = telemetry.memory_by_rank(run=facts.run)
    selected = request.GET.get("rank", "")
    rank = int(selected) if selected.isdecimal() and int(selected) in by_rank else None
    parts = [
        part
        for part in training_panels.MEMORY_PARTS
        if any(values.get(part) for values in by_rank.values())
    ]
    return {
        "panels": [
            panel.to_dict()
            for panel in predicted.with_levels(
                run_charts.memory(facts.names, rank), facts.run.prediction
            )
        ],
        "predicted": predicted.content(facts, memory=True),
        "ranks": sorted(by_rank),
        "rank": min(by_rank, default=0) if rank is None else rank,
        "parts": parts,
        "part_titles": [run_charts.memory_title(part) for part in parts],
        "rows": rows(by_rank, parts),
        "offloaded": any(values.get("offloaded") for values in by_rank.values()),
        "source": facts.source(),
    }


def rows(by_rank: dict[int, dict[str, float]], parts: list[str]) -> list[dict[str, Any]]:
    """Return one bar per rank: its categories in percent of the largest sum, and as text."""
    result = []
    sums = {rank: sum(values.get(part, 0.0) for part in parts) for rank, values in by_rank.items()}
    full = max([*sums.values(), 1.0])
    for rank, values in sorted(by_rank.items())[:64]:
        bar = [
            {"part": part, "share": f"{100 * values.get(part, 0.0) / full:.2f}"} for part in parts
        ]
        cells = [formatting.memory(values.get(part)) for part in parts]
        capacity = values.get("capacity")
        share = (
            _("%(share)s of %(capacity)s")
            % {
                "share": formatting.percent(sums[rank] / capacity),
                "capacity": formatting.memory(capacity),
            }
            if capacity
            else ""
        )
        result.append(
            {
                "rank": rank,
                "bar": bar,
                "cells": cells,
                "sum": formatting.memory(sums[rank]),
                "share": share,
                "offloaded": formatting.memory(values.get("offloaded")),
            }
        )
    return result
