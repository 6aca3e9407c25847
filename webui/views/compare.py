"""Compare page: up to twenty runs of any kind side by side, what each reached and where their specs
differ.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from orchestrator.common.errors import invalid
from orchestrator.runs import selectors
from orchestrator.runs.outputs import endpoint, evaluation_results
from orchestrator.telemetry import selectors as telemetry
from webui.charts.run_comparison import MEASURES, Measure, differing, reached
from webui.presentation import formatting
from webui.tabs.evaluation import MEANS
from webui.views.access import PageRequest, page

MOST: Final = 20
# a median says more than the newest
_STEADY: Final = ("tokens_per_s", "mfu", "inference/tokens_per_s")


@page
@require_GET
def compare(request: PageRequest) -> HttpResponse:
    """`?runs=12,14,15`: the first is the one that the others are measured against."""
    ids = list(
        dict.fromkeys(
            part.strip() for part in request.GET.get("runs", "").split(",") if part.strip()
        )
    )
    if not 1 <= len(ids) <= MOST or not all(part.isdecimal() for part in ids):
        raise invalid(
            "runs",
            f"{request.GET.get('runs', '')[:80]!r} does not name 1 to {MOST} runs",
            "?runs=12,14",
        )
    runs = [selectors.run_get(user=request.user, id=id) for id in ids]
    numbers = [numbers_of(run) for run in runs]
    judged = [
        Measure(f"judged/{name}", title, unit, better, means)
        for name, (title, unit, better, means) in MEANS.items()
    ]
    kinds = sorted({run.kind for run in runs})
    rows = reached([*judged, *MEASURES], numbers)
    context = {
        "runs": runs,
        "rows": rows,
        "differs": differing([_spec(run) for run in runs]),
        "sentence": _sentence(runs, kinds),
        "ids": ",".join(ids),
    }
    return render(request, "webui/compare.html", context)


def numbers_of(run: Any) -> dict[str, float]:
    """What a run of any kind reached, by the names of `MEASURES` and `judged/…`."""
    latest = telemetry.latest(run=run)
    found = {
        each.name: latest[each.name]
        for each in MEASURES
        if formatting.number(latest.get(each.name)) is not None
    }
    for name in _STEADY:
        if name in latest:
            values = [
                y for y in telemetry.series(run=run, name=name, points=500).y if y == y and y > 0
            ]
            found |= {name: median(values)} if values else {}
    told = endpoint.summary_of(run=run) if run.kind == "serve" else None
    if told is not None and told.requests:
        found["requests"] = float(told.requests)
        for name, percentiles in (("ttft", told.ttft_s), ("tpot", told.tpot_s)):
            found |= {f"{name}_{share}": value for share, value in (percentiles or {}).items()}
    elif run.kind in (
        "serve",
        "generate",
    ):  # under way, or killed: the median of what it told now and then
        for name in ("ttft", "tpot"):
            if formatting.number(latest.get(f"inference/{name}_s")) is not None:
                found[f"{name}_p50"] = median(
                    telemetry.series(run=run, name=f"inference/{name}_s", points=500).y
                )
    if run.kind == "evaluate" and (judged := evaluation_results.evaluated(run=run)) is not None:
        found = {name: value for name, value in found.items() if name not in judged.metrics}
        found |= {f"judged/{name}": value for name, value in judged.metrics.items()}
    if run.started and run.devices:
        found["device_hours"] = (
            run.devices * ((run.ended or timezone.now()) - run.started).total_seconds() / 3600
        )
    return found


def _spec(run: Any) -> dict[str, Any]:
    return {**run.spec, "plan": run.plan} if run.plan else dict(run.spec)


def _sentence(runs: list[Any], kinds: list[str]) -> str:
    what = (
        f"{formatting.count(len(runs), f'{kinds[0]} run')}"
        if len(kinds) == 1
        else formatting.count(len(runs), "run")
    )
    if len(runs) == 1:
        return f"One {runs[0].kind} run: add others by their boxes in the list of runs."
    return f"{what} beside each other; differences are against run {runs[0].pk}, {runs[0].name}."
