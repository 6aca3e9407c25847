"""Predicted vs measured numbers of a run, for the performance and memory tabs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from django.utils.translation import gettext as _

from orchestrator.telemetry import outcome
from webui.charts import predicted_vs_measured
from webui.charts.panel import Level, Panel
from webui.forms.forecast import planner_query, used_split
from webui.planner import phrases
from webui.planner.charts import memory as plan_memory
from webui.planner.charts import time
from webui.presentation import formatting
from webui.presentation.run_facts import Facts

_MEMORY: Final = "memory/"


def content(facts: Facts, *, memory: bool, measured: bool = False) -> dict[str, Any] | None:
    """Return rows of memory or of all other metrics; None for a run without prediction.

    `measured` reads the curves (about thirty queries); the page requests it after loading.
    """
    predicted = facts.run.prediction
    # serving predictions are shown on the Requests tab
    if not predicted or predicted.get("kind") == "serving":
        return None
    compared = [item.to_dict() for item in outcome.comparisons(run=facts.run)] if measured else []
    known = {item["metric"] for item in compared}
    compared += [
        item
        for item in predicted_vs_measured.predicted_metrics(predicted)
        if item["metric"] not in known
    ]
    rows = [
        row
        for row in predicted_vs_measured.rows(compared)
        if row.metric.startswith(_MEMORY) == memory
    ]
    verdict, mood = phrases.verdict(predicted)
    query = planner_query(facts.run.spec, {"plan": facts.run.plan, "prediction": predicted})
    return {
        "rows": rows,
        "summary": predicted_vs_measured.summary(rows) if measured else _("Loading measurements…"),
        "waiting": not measured,
        "part": "memory" if memory else "performance",
        "link": query,
        "verdict": verdict,
        "mood": mood,
        "calibration": predicted.get("calibration") or "",
        "assumed": bool(predicted.get("assumed")),
        "device": predicted.get("device") or "",
        "time": time.waterfall(predicted),
        "treemap": plan_memory.treemap(predicted["memory"], with_free=False),
        "splits": [] if memory else splits(facts, compared),
        "memory_summary": plan_memory.summary(predicted["memory"]),
    }


def splits(facts: Facts, compared: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The compared splits of devices between training and rollouts; the used one is measured."""
    predicted = facts.run.prediction or {}
    used = used_split(facts.run.spec, predicted)
    measured = next((item for item in compared if item["metric"] == "step_time_s"), {})
    return [
        {
            "training": each["training"],
            "rollouts": each["rollouts"],
            "plan": each["plan"],
            "fits": each["fits"],
            "predicted": formatting.seconds(each["step_time_s"]),
            "used": each is used,
            "measured": formatting.seconds(measured.get("measured")) if each is used else "",
        }
        for each in predicted.get("splits") or []
    ]


def with_levels(panels: Iterable[Panel], prediction: dict[str, Any] | None) -> list[Panel]:
    """Add predictions to the charts as dashed lines in the color of their metric."""
    if not prediction:
        return list(panels)
    metrics = predicted_vs_measured.predicted_metrics(prediction)
    values = {item["metric"]: item["predicted"] for item in metrics}
    conditions = {
        item["metric"]: f", {item['condition']}" for item in metrics if item.get("condition")
    }
    result = []
    for panel in panels:
        levels = [
            Level(
                _("%(metric)s predicted") % {"metric": _(line.label)}
                + conditions.get(line.name, ""),
                line.hue,
                float(values[line.name]),
            )
            for line in panel.series
            if line.name in values and panel.kind != "stack"
        ]
        if panel.id == "step_split" and "step_time_s" in values:
            levels = [Level(_("predicted step time"), "time", float(values["step_time_s"]))]
        if panel.id == "memory" and "memory/allocated_bytes" in values:
            levels = [Level(_("predicted peak"), "text-2", float(values["memory/allocated_bytes"]))]
        result.append(replace(panel, levels=tuple(levels)))
    return result
