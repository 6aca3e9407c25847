"""Compare page: curves, metrics and spec differences of up to a hundred runs of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET

from orchestrator.common import live
from orchestrator.common.errors import invalid, missing_object
from orchestrator.common.units import is_id
from orchestrator.run_table import selectors as run_table
from orchestrator.runs import selectors
from orchestrator.runs.outputs import endpoint, evaluation_results
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from orchestrator.tracking import selectors as tracking
from webui.charts.run_comparison import MEASURES, Measure, compare_metrics, compare_specs
from webui.presentation.run_facts import TYPICAL
from webui.tabs.evaluation_metrics import METRICS
from webui.views.access import PageRequest, page
from workers.contracts.wire.serving_reports import Evaluated, Summary

MOST: Final = 100
_SUMMARIES: Final = 100  # rows of values of summaries
_AXES: Final[dict[str, telemetry.Axis]] = {
    "step": "step",
    "time": "time",
    "tokens": "tokens",
    "flops": "flops",
}
_POINTS: Final = 400  # of a curve; every extreme stays
BEFORE = gettext_noop("before training")
WIN_RATE = gettext_noop("Win rate")
WINS = gettext_noop("share of examples for which the judge prefers the answer after training")


@page
@require_GET
def compare(request: PageRequest) -> HttpResponse:
    """Compare `?runs=12,14,15`; differences are relative to the first."""
    runs = chosen_runs(request)
    ids = [str(run.pk) for run in runs]
    evaluated = [
        measure
        for name, (title, unit, better, meaning) in METRICS.items()
        for measure in (
            Measure(f"evaluated/{name}", title, unit, better, meaning),
            Measure(f"before/{name}", f"{_(title)}, {_(BEFORE)}", unit, "", ""),
        )
    ]
    evaluated.append(Measure("win_rate", WIN_RATE, "share", "higher", WINS))
    kinds = sorted({run.kind for run in runs})
    details = tracking.details_of_runs([run.pk for run in runs])
    summaries = [
        {
            f"summary.{name}": float(value)
            for name, value in tracking.flat(details[run.pk].summary).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if run.pk in details
        else {}
        for run in runs
    ]
    summarized = [
        Measure(name, name.removeprefix("summary."), "", "", _("recorded by the program"))
        for name in sorted({name for values in summaries for name in values})[:_SUMMARIES]
    ]
    numbers = [{**own, **more} for own, more in zip(metrics_of(runs), summaries, strict=True)]
    rows = compare_metrics([*evaluated, *MEASURES, *summarized], numbers)
    context = {
        "runs": runs,
        "rows": rows,
        "differs": compare_specs([recorded_spec(run, details.get(run.pk)) for run in runs]),
        "unrecorded": [
            run for run in runs if run.kind == "external" and _has_no_config(details.get(run.pk))
        ],
        "sentence": _sentence(runs, kinds),
        "ids": ",".join(ids),
        "names": run_table.metric_names_of([run.pk for run in runs]),
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        "curves": [{"id": run.pk, "name": run.name} for run in runs],
    }
    return render(request, "webui/compare.html", context)


@page
@require_GET
def curves(request: PageRequest) -> HttpResponse:
    """One metric of `?runs=12,14` as JSON: a curve per run that has it, with all extremes.

    Without FLOPs or tokens of a run, its curve is left out.
    """
    runs = chosen_runs(request)
    name = request.GET.get("name", "loss")[:120]
    text = request.GET.get("x", "step")
    axis = _AXES.get(text)
    if axis is None:
        raise invalid("x", _("%(text)r is not an axis") % {"text": text[:40]}, _("Use step."))
    items, missing = [], []
    answers = telemetry.series_of_runs(runs=runs, name=name, x=axis, points=_POINTS)
    for run in runs:
        curve = answers.get(run.pk)
        if curve is None or not curve.x:
            missing.append(run.pk)
            continue
        start = curve.x[0] if axis == "time" else 0
        places = [_short(at - start) for at in curve.x] if axis in ("time", "flops") else curve.x
        y = [_short(value) for value in curve.y]
        items.append({"run": run.pk, "x": places, "y": y, "unit": curve.unit})
    body = live.dumps({"name": name, "axis": axis, "items": items, "missing": missing})
    return HttpResponse(body, content_type="application/json; charset=utf-8")


def _short(value: float) -> float:
    """The number with as many digits as a chart can show, in half the bytes."""
    return float(f"{value:.7g}")


def chosen_runs(request: PageRequest) -> list[Any]:
    """The runs of the URL in its order. Raises 422 for a wrong list, 404 for a hidden run."""
    text = request.GET.get("runs", "")
    ids = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not 1 <= len(ids) <= MOST or not all(is_id(part) for part in ids):
        raise invalid(
            "runs",
            _("%(text)r does not name 1 to %(most)s runs") % {"text": text[:80], "most": MOST},
            _("Use a URL that ends with ?runs=12,14."),
        )
    visible = selectors.runs_visible_to(user=request.user)
    by_id = {run.pk: run for run in visible.filter(pk__in=[int(id) for id in ids])}
    for id in ids:
        if int(id) not in by_id:
            raise missing_object("run", id)
    return [by_id[int(id)] for id in ids]


def metrics_of(runs: Sequence[Any]) -> list[dict[str, float]]:
    """Return each run's metrics by the names of `MEASURES` and `evaluated/…`.

    The same for two runs and for a hundred: the stored summary of each metric, of `TYPICAL` ones
    its median over all steps, else its newest value.
    """
    numbers = telemetry.current_numbers(runs)
    times = scheduling.run_times([run.pk for run in runs])
    served = endpoint.summaries_of(run_ids=[run.pk for run in runs if run.kind == "serve"])
    evaluated = evaluation_results.evaluations_of(
        run_ids=[run.pk for run in runs if run.kind == "evaluate"]
    )
    return [
        _metrics(run, numbers[run.pk], times.get(run.pk), served.get(run.pk), evaluated.get(run.pk))
        for run in runs
    ]


def _metrics(
    run: Any,
    numbers: Mapping[str, telemetry.Numbers],
    time: scheduling.RunTime | None,
    served: Summary | None,
    results: Evaluated | None,
) -> dict[str, float]:
    metrics = {
        measure.name: value
        for measure in MEASURES
        if (logged := numbers.get(measure.name)) is not None
        and (value := logged.median if measure.name in TYPICAL else logged.last) is not None
    }
    if served is not None and served.requests:
        metrics["requests"] = float(served.requests)
        first = "score" if "inference/score_s" in numbers else "ttft"
        for name, percentiles in ((first, served.ttft_s), ("tpot", served.tpot_s)):
            metrics |= {f"{name}_{share}": value for share, value in (percentiles or {}).items()}
    elif run.kind in ("serve", "generate"):  # running or killed: the median over its points
        for name in ("ttft", "tpot", "score"):
            logged = numbers.get(f"inference/{name}_s")
            if logged is not None and logged.median is not None:
                metrics[f"{name}_p50"] = logged.median
    if results is not None:
        metrics = {name: value for name, value in metrics.items() if name not in results.metrics}
        metrics |= {f"evaluated/{name}": value for name, value in results.metrics.items()}
        metrics |= {f"before/{name}": value for name, value in results.before.items()}
        if results.judged is not None:
            metrics["win_rate"] = results.judged.rate
    if time is not None and time.device_s:
        metrics["device_hours"] = time.device_hours
    return metrics


def recorded_spec(run: Any, details: Any) -> dict[str, Any]:
    """The spec, the plan, and what the program recorded about its configuration and code."""
    spec = {**run.spec, "plan": run.plan} if run.plan else dict(run.spec)
    if details is None:
        return spec
    origin = {
        name: " ".join(value) if isinstance(value, list) else value
        for name, value in details.program.items()
        if name in ("command", "commit", "branch", "dirty", "python")
    }
    return spec | {"config": details.config, "program": origin}


def _has_no_config(details: Any) -> bool:
    return details is None or not details.config


def _sentence(runs: list[Any], kinds: list[str]) -> str:
    first = runs[0]
    if len(runs) == 1:
        return _("One %(kind)s run. Select more runs in the list of runs to compare.") % {
            "kind": first.kind
        }
    kind = f"{kinds[0]} " if len(kinds) == 1 else ""
    return _("%(count)s %(kind)sruns; differences are relative to run %(id)s, %(name)s.") % {
        "count": len(runs),
        "kind": kind,
        "id": first.pk,
        "name": first.name,
    }
