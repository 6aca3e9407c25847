"""What performance and memory tab share: the run's prediction beside what is measured, and levels
for the charts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from orchestrator.telemetry import outcome
from webui.charts import predicted_vs_measured
from webui.charts.panels import Level, Panel
from webui.forms.forecast import planner_query
from webui.planner import phrases
from webui.planner.charts import memory as plan_memory
from webui.planner.charts import time
from webui.presentation.run_facts import Facts

_MEMORY: Final = "memory/"


def content(facts: Facts, *, memory: bool, measured: bool = False) -> dict[str, Any] | None:
    """`{rows, summary, …}`, rows of memory or of everything else; None for a run without
    prediction.

    `measured` reads the curves, some thirty queries: asked for by the page once it is there.
    """
    predicted = facts.run.prediction
    # that has a table of its own, beside the requests
    if not predicted or predicted.get("kind") == "serving":
        return None
    found = [each.to_dict() for each in outcome.comparisons(run=facts.run)] if measured else []
    known = {item["metric"] for item in found}
    found += [
        item for item in predicted_vs_measured.foreseen(predicted) if item["metric"] not in known
    ]
    rows = [
        row for row in predicted_vs_measured.rows(found) if row.metric.startswith(_MEMORY) == memory
    ]
    says, mood = phrases.verdict(predicted)
    query = planner_query(facts.run.spec, {"plan": facts.run.plan, "prediction": predicted})
    return {
        "rows": rows,
        "summary": predicted_vs_measured.summary(rows)
        if measured
        else "Reading what was measured…",
        "waits": not measured,
        "part": "memory" if memory else "performance",
        "link": query,
        "verdict": says,
        "mood": mood,
        "calibration": predicted.get("calibration") or "",
        "assumed": bool(predicted.get("assumed")),
        "device": predicted.get("device") or "",
        "time": time.waterfall(predicted),
        "treemap": plan_memory.treemap(predicted["memory"], with_free=False),
        "memory_says": plan_memory.summary(predicted["memory"]),
    }


def with_levels(panels: Iterable[Panel], prediction: dict[str, Any] | None) -> list[Panel]:
    """The charts with their predictions as dashed levels, in the colour of what they predict."""
    if not prediction:
        return list(panels)
    foreseen = predicted_vs_measured.foreseen(prediction)
    values = {item["metric"]: item["predicted"] for item in foreseen}
    of = {item["metric"]: f", {item['of']}" for item in foreseen if item.get("of")}
    made = []
    for panel in panels:
        levels = [
            Level(
                f"{line.label} predicted{of.get(line.name, '')}", line.hue, float(values[line.name])
            )
            for line in panel.series
            if line.name in values and panel.kind != "stack"
        ]
        if panel.id == "step_split" and "step_time_s" in values:
            levels = [Level("step predicted", "time", float(values["step_time_s"]))]
        if panel.id == "memory" and "memory/allocated_bytes" in values:
            levels = [Level("peak predicted", "text-2", float(values["memory/allocated_bytes"]))]
        made.append(replace(panel, levels=tuple(levels)))
    return made
