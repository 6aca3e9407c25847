"""What the charts of the Compare page draw: configuration, metrics, prediction errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from orchestrator.common import live
from orchestrator.common.errors import invalid
from orchestrator.telemetry import selectors as telemetry
from orchestrator.tracking import selectors as tracking
from webui.charts.parameter_importance import importances
from webui.charts.run_comparison import flat_spec
from webui.views.access import PageRequest, page
from webui.views.runs.compare import chosen_runs, recorded_spec

_AGGREGATES: Final = ("last", "min", "max", "mean", "median")
_MOST: Final = 300  # metrics, and configuration values that differ
_SEEDS: Final = ("train.seed", "seed", "config.seed")
_PREDICTED: Final = ("step_time_s", "tokens_per_s", "mfu")


@page
@require_GET
def values(request: PageRequest) -> HttpResponse:
    """JSON of `?runs=12,14`: `config` values that differ, `metrics` and `errors` of predictions.

    Each list is in the order of the runs, with null for a run without the value. With `metric` and
    `aggregate` also `importances` of the configuration values for that metric.
    """
    runs = chosen_runs(request)
    details = tracking.details_of_runs([run.pk for run in runs])
    config = _config([flat_spec(recorded_spec(run, details.get(run.pk))) for run in runs])
    numbers = telemetry.current_numbers(runs)
    metrics = _metrics([numbers[run.pk] for run in runs])
    body: dict[str, Any] = {
        "config": config,
        "metrics": metrics,
        "errors": _errors(runs, [numbers[run.pk] for run in runs]),
    }
    if name := request.GET.get("metric", "")[:120]:
        aggregate = request.GET.get("aggregate", "last")
        if aggregate not in _AGGREGATES:
            raise invalid(
                "aggregate",
                _("%(text)r is not an aggregate") % {"text": aggregate[:40]},
                ", ".join(_AGGREGATES),
            )
        column = metrics.get(name, {}).get(aggregate, [None] * len(runs))
        free = {key: column for key, column in config.items() if key not in _SEEDS}
        body["importances"] = [asdict(one) for one in importances(free, column)]
    return HttpResponse(live.dumps(body), content_type="application/json; charset=utf-8")


def _config(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values that differ between runs; lists and objects are left out."""
    names = sorted({name for spec in specs for name in spec})
    columns: dict[str, list[Any]] = {}
    for name in names:
        column = [spec.get(name) for spec in specs]
        if not all(value is None or isinstance(value, str | int | float) for value in column):
            continue
        if any(value != column[0] for value in column) and len(columns) < _MOST:
            columns[name] = [value[:80] if isinstance(value, str) else value for value in column]
    return columns


def _metrics(
    numbers: Sequence[Mapping[str, telemetry.Numbers]],
) -> dict[str, dict[str, list[float | None]]]:
    """Those that most runs have first."""
    counts: dict[str, int] = {}
    for own in numbers:
        for name in own:
            counts[name] = counts.get(name, 0) + 1
    names = sorted(counts, key=lambda name: (-counts[name], name))[:_MOST]
    return {
        name: {
            aggregate: [getattr(own[name], aggregate) if name in own else None for own in numbers]
            for aggregate in _AGGREGATES
        }
        for name in names
    }


def _errors(
    runs: Sequence[Any], numbers: Sequence[Mapping[str, telemetry.Numbers]]
) -> dict[str, list[list[float] | None]]:
    """`[predicted, measured]` of each run: the prediction before its start, the median after."""
    columns: dict[str, list[list[float] | None]] = {}
    for name in _PREDICTED:
        column: list[list[float] | None] = []
        for run, own in zip(runs, numbers, strict=True):
            predicted = (run.prediction or {}).get(name)
            measured = own[name].median if name in own else None
            if isinstance(predicted, int | float) and predicted > 0 and measured:
                column.append([float(predicted), float(measured)])
            else:
                column.append(None)
        if any(column):
            columns[name] = column
    return columns
