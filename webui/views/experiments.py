"""Experiments: a question, the runs that answer it, and the best so far.

Reads selectors, writes by services.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_http_methods

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, forbidden
from orchestrator.runs import selectors, services
from orchestrator.telemetry import selectors as telemetry
from webui.presentation import formatting
from webui.presentation.markdown import rendered
from webui.views.access import PageRequest, done, field_errors, may, page
from webui.views.runs import row

SHOWN = 100
RUNS = 200  # of an experiment, newest first


@dataclass(frozen=True)
class Best:
    """The lowest value that a run of the experiment reached; validation counts before training
    loss.
    """

    run: Any
    metric: str
    value: float


@page
@require_GET
def experiments(request: PageRequest) -> HttpResponse:
    q = request.GET.get("q", "").strip()
    found = selectors.experiments_visible_to(user=request.user)
    shown: list[Any] = list((found.filter(name__icontains=q) if q else found)[:SHOWN])
    runs = selectors.runs_visible_to(user=request.user).filter(
        experiment_id__in=[item.pk for item in shown]
    )
    by_experiment: dict[int, list[Any]] = {}
    for run in runs.order_by("-id")[: 2 * RUNS]:
        by_experiment.setdefault(run.experiment_id or 0, []).append(run)
    every = [run for some in by_experiment.values() for run in some]
    lowest = best_values(every, telemetry.sparkline(run_ids=[run.pk for run in every], name="loss"))
    rows = [
        {"item": item, "best": best_of(by_experiment.get(item.pk, []), lowest)} for item in shown
    ]
    context = {
        "rows": rows,
        "q": q,
        "runs": sum(item.run_count for item in shown),
        "may_create": _may_create(request),
    }
    return render(request, "webui/experiments.html", context)


@page
@require_GET
def experiment(request: PageRequest, id: int) -> HttpResponse:
    item = selectors.experiment_get(user=request.user, id=id)
    runs = selectors.run_list(user=request.user, experiment=item.pk, limit=RUNS)
    sparks = telemetry.sparkline(run_ids=[run.pk for run in runs], name="loss")
    lowest = best_values(runs, sparks)
    best = best_of(runs, lowest)
    rows = [{**row(run, sparks.get(run.pk, [])), "low": lowest.get(run.pk)} for run in runs]
    context = {
        "item": item,
        "rows": rows,
        "best": best,
        "sentence": sentence(runs, best),
        "notes": rendered(item.notes),
        "may_edit": item.owner_id == request.user.pk or may(request.user, Role.OPERATOR),
        "more": len(runs) == RUNS,
        "may_create": _may_create(request),
    }
    return render(request, "webui/experiment.html", context)


@page
@require_http_methods(["GET", "POST"])
def create(request: PageRequest) -> HttpResponse:
    if request.method == "POST":
        try:
            made = services.experiment_create(
                owner=request.user, **_typed(request, "name", "hypothesis", "notes")
            )
        except Refusal as refusal:
            return _form(request, refusal=refusal)
        return done(request, f"{made.name} is there. Submit its first run.", "experiment", made.pk)
    return _form(request)


@page
@require_http_methods(["GET", "POST"])
def edit(request: PageRequest, id: int) -> HttpResponse:
    item = selectors.experiment_get(user=request.user, id=id)
    if item.owner_id != request.user.pk and not may(request.user, Role.OPERATOR):
        raise forbidden(
            f"{item.name} belongs to {item.owner.username}; its owner and operators edit it."
        )
    if request.method == "POST":
        try:
            services.experiment_update(
                experiment=item, by=request.user, **_typed(request, "hypothesis", "notes")
            )
        except Refusal as refusal:
            return _form(request, item=item, refusal=refusal)
        return done(request, "Saved.", "experiment", item.pk)
    return _form(request, item=item)


def best_values(
    runs: Iterable[Any], losses: dict[int, list[float]]
) -> dict[int, tuple[str, float]]:
    """`{run: (metric, lowest value)}`: of `val_loss` where a run has it, else of `loss`; small
    curves keep extremes.
    """
    validated = telemetry.sparkline(run_ids=[run.pk for run in runs], name="val_loss")
    found: dict[int, tuple[str, float]] = {}
    for metric, curves in (("loss", losses), ("val_loss", validated)):
        for id, values in curves.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                found[id] = (metric, min(finite))
    return found


def best_of(runs: Iterable[Any], lowest: dict[int, tuple[str, float]]) -> Best | None:
    """The run with the lowest validation loss; with the lowest training loss where none was
    validated.
    """
    known = [(run, *lowest[run.pk]) for run in runs if run.pk in lowest]
    validated = [one for one in known if one[1] == "val_loss"]
    if not known:
        return None
    run, metric, value = min(validated or known, key=lambda one: one[2])
    return Best(run, metric, value)


def sentence(runs: list[Any], best: Best | None) -> str:
    if not runs:
        return "No run has tried to answer it yet."
    alive = sum(run.state in ("starting", "running", "stopping") for run in runs)
    text = formatting.count(len(runs), "run") + (f", {alive} in flight" if alive else "")
    if best is None:
        return f"{text}; no loss is known yet."
    what = "validation loss" if best.metric == "val_loss" else "loss"
    return (
        f"{text}; best so far: {what} {formatting.quantity(best.value, 4)} by run {best.run.pk} "
        f"{best.run.name}."
    )


def _may_create(request: PageRequest) -> bool:
    return may(request.user, Role.SUBMITTER)


def _typed(request: PageRequest, *names: str) -> dict[str, str]:
    return {name: request.POST.get(name, "").replace("\r\n", "\n") for name in names}


def _form(request: PageRequest, item: Any = None, refusal: Refusal | None = None) -> HttpResponse:
    typed = _typed(request, "name", "hypothesis", "notes") if request.method == "POST" else {}
    shown = {
        name: typed.get(name) or (getattr(item, name) if item else "")
        for name in ("name", "hypothesis", "notes")
    }
    context = {
        "item": item,
        "shown": shown,
        "refusal": refusal,
        "errors": field_errors(refusal) if refusal else {},
    }
    return render(
        request, "webui/experiment_form.html", context, status=refusal.status if refusal else 200
    )
