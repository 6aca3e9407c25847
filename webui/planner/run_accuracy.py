"""The page that compares predictions of ended training runs with their measurements, by term."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET

from orchestrator.runs import selectors
from orchestrator.runs.submission.prediction.whole_run import without_restarts
from webui.presentation import formatting
from webui.views.access import PageRequest, page

_RUNS: Final = 200
# key of `measured` → (label, goal for the median)
_TERMS: Final = {
    "step_time_s": (gettext_noop("Step time"), 0.15),
    "allocated_bytes": (gettext_noop("Memory, total"), 0.15),
    "total_s": (gettext_noop("Whole run"), 0.10),
    "beyond_steps_s": (gettext_noop("Start, evaluation, checkpoints"), 0.25),
}
_WIDE: Final = 0.6  # log error at the edges of the chart


@dataclass(frozen=True, slots=True)
class Term:
    """Errors of one term over all runs; `dots` are positions in percent, 50 is exact."""

    label: str
    count: int
    median: str
    worst: str
    bias: str
    inside: str
    mood: str
    dots: list[float]


@page
@require_GET
def run_accuracy(request: PageRequest) -> HttpResponse:
    """Show errors by term and by run."""
    runs = [
        run
        for run in selectors.run_list(user=request.user, kind="train", limit=_RUNS)
        if run.prediction and run.prediction.get("measured")
    ]
    context = {
        "tab": "planner-accuracy",
        "headline": "",
        "terms": terms(runs),
        "rows": [_row(run) for run in runs],
        "count": len(runs),
    }
    return render(request, "webui/planner/run_accuracy.html", context)


def predicted_values(prediction: dict[str, Any]) -> dict[str, float | None]:
    """The predicted number of each term."""
    whole = prediction.get("whole_run") or {}
    parts = whole.get("terms") or {}
    memory = prediction.get("memory") or {}
    counted = prediction.get("device") != "cpu" or memory.get("unattributed_bytes")
    return {
        "step_time_s": prediction.get("step_time_s"),
        "allocated_bytes": memory.get("total_bytes") if counted else None,
        # both are measured on runs with one attempt, which did not restart
        "total_s": without_restarts(whole).get("total_s"),
        "beyond_steps_s": sum(parts.values())
        - sum(parts.get(name, 0.0) for name in ("steps_s", "rollouts_s", "restarts_s"))
        if parts
        else None,
    }


def terms(runs: list[Any]) -> list[Term]:
    """One row per term that some run has measured."""
    result = []
    for key, (label, goal) in _TERMS.items():
        ratios, inside, bounded = [], 0, 0
        for run in runs:
            ratio = _ratio(run.prediction, key)
            if ratio is None:
                continue
            ratios.append(ratio)
            low, high = _bounds(run.prediction, key)
            if low is not None and high is not None:
                bounded += 1
                inside += low <= run.prediction["measured"][key] <= high
        if not ratios:
            continue
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        result.append(
            Term(
                _(label),
                len(ratios),
                formatting.percent(median(errors)),
                formatting.percent(errors[-1]),
                f"{median(ratios) - 1:+.1%}".replace("-", "−"),
                formatting.percent(inside / bounded) if bounded else formatting.DASH,
                "good" if median(errors) <= goal else "warn",
                [round(_position(ratio), 2) for ratio in ratios],
            )
        )
    return result


def _row(run: Any) -> dict[str, Any]:
    prediction = run.prediction
    cells = []
    for key in _TERMS:
        ratio = _ratio(prediction, key)
        text = formatting.DASH if ratio is None else f"{ratio - 1:+.1%}".replace("-", "−")
        cells.append({"label": _(_TERMS[key][0]), "text": text})
    return {
        "id": run.pk,
        "name": run.name,
        "device": prediction.get("device") or "",
        "calibration": prediction.get("calibration") or _("datasheet"),
        "cells": cells,
        "ended": run.ended,
    }


def _ratio(prediction: dict[str, Any], key: str) -> float | None:
    """Measured over predicted."""
    predicted = predicted_values(prediction)[key]
    value = prediction["measured"].get(key)
    return value / predicted if predicted and value else None


def _bounds(prediction: dict[str, Any], key: str) -> tuple[float | None, float | None]:
    if key == "step_time_s":
        return prediction.get("step_time_low_s"), prediction.get("step_time_high_s")
    whole = without_restarts(prediction.get("whole_run") or {})
    return (whole.get("low_s"), whole.get("high_s")) if key == "total_s" else (None, None)


def _position(ratio: float) -> float:
    """Percent of the chart's width: 50 is exact, the edges are far off."""
    share = (ratio - 1) / _WIDE
    return 50 + 50 * max(-1.0, min(1.0, share))
