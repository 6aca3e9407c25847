"""Compare page: metrics and spec differences of up to twenty runs of any kind."""

from __future__ import annotations

from statistics import median
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET

from orchestrator.common.errors import invalid
from orchestrator.runs import selectors
from orchestrator.runs.outputs import endpoint, evaluation_results
from orchestrator.telemetry import selectors as telemetry
from webui.charts.run_comparison import MEASURES, Measure, compare_metrics, compare_specs
from webui.presentation import formatting
from webui.tabs.evaluation_metrics import METRICS
from webui.views.access import PageRequest, page

MOST: Final = 20
BEFORE = gettext_noop("before training")
WIN_RATE = gettext_noop("Win rate")
WINS = gettext_noop("share of examples for which the judge prefers the answer after training")
# compared by their median over steps
_STEADY: Final = ("tokens_per_s", "mfu", "inference/tokens_per_s")


@page
@require_GET
def compare(request: PageRequest) -> HttpResponse:
    """Compare `?runs=12,14,15`; differences are relative to the first."""
    ids = list(
        dict.fromkeys(
            part.strip() for part in request.GET.get("runs", "").split(",") if part.strip()
        )
    )
    if not 1 <= len(ids) <= MOST or not all(part.isdecimal() for part in ids):
        raise invalid(
            "runs",
            _("%(text)r does not name 1 to %(most)s runs")
            % {"text": request.GET.get("runs", "")[:80], "most": MOST},
            _("Use a URL that ends with ?runs=12,14"),
        )
    runs = [selectors.run_get(user=request.user, id=id) for id in ids]
    numbers = [metrics_of(run) for run in runs]
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
    rows = compare_metrics([*evaluated, *MEASURES], numbers)
    context = {
        "runs": runs,
        "rows": rows,
        "differs": compare_specs([_spec(run) for run in runs]),
        "sentence": _sentence(runs, kinds),
        "ids": ",".join(ids),
    }
    return render(request, "webui/compare.html", context)


def metrics_of(run: Any) -> dict[str, float]:
    """Return a run's metrics by the names of `MEASURES` and `evaluated/…`."""
    latest = telemetry.latest(run=run)
    metrics = {
        measure.name: latest[measure.name]
        for measure in MEASURES
        if formatting.number(latest.get(measure.name)) is not None
    }
    for name in _STEADY:
        if name in latest:
            values = [
                y for y in telemetry.series(run=run, name=name, points=500).y if y == y and y > 0
            ]
            metrics |= {name: median(values)} if values else {}
    served = endpoint.summary_of(run=run) if run.kind == "serve" else None
    if served is not None and served.requests:
        metrics["requests"] = float(served.requests)
        for name, percentiles in (("ttft", served.ttft_s), ("tpot", served.tpot_s)):
            metrics |= {f"{name}_{share}": value for share, value in (percentiles or {}).items()}
    elif run.kind in (
        "serve",
        "generate",
    ):  # running or killed: the median over its logged points
        for name in ("ttft", "tpot"):
            if formatting.number(latest.get(f"inference/{name}_s")) is not None:
                metrics[f"{name}_p50"] = median(
                    telemetry.series(run=run, name=f"inference/{name}_s", points=500).y
                )
    if run.kind == "evaluate" and (results := evaluation_results.evaluated(run=run)) is not None:
        metrics = {name: value for name, value in metrics.items() if name not in results.metrics}
        metrics |= {f"evaluated/{name}": value for name, value in results.metrics.items()}
        metrics |= {f"before/{name}": value for name, value in results.before.items()}
        if results.judged is not None:
            metrics["win_rate"] = results.judged.rate
    if run.started and run.devices:
        metrics["device_hours"] = (
            run.devices * ((run.ended or timezone.now()) - run.started).total_seconds() / 3600
        )
    return metrics


def _spec(run: Any) -> dict[str, Any]:
    return {**run.spec, "plan": run.plan} if run.plan else dict(run.spec)


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
