"""Experiment pages: hypothesis, notes, runs and the best result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_http_methods

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, forbidden
from orchestrator.runs import selectors, services
from orchestrator.telemetry import selectors as telemetry
from webui.presentation import formatting
from webui.presentation.markdown import render_markdown
from webui.views.access import PageRequest, field_errors, has_role, page, redirect_with_message
from webui.views.runs import row

SHOWN = 100
RUNS = 200  # of an experiment, newest first


@dataclass(frozen=True)
class Best:
    """The lowest loss of an experiment's runs; validation loss if there is any."""

    run: Any
    metric: str
    value: float

    @property
    def title(self) -> str:
        """Readable name of the metric."""
        return metric_title(self.metric)


def metric_title(metric: str) -> str:
    """Return the readable name of a loss metric."""
    return _("validation loss") if metric == "val_loss" else _("loss")


@page
@require_GET
def experiments(request: PageRequest) -> HttpResponse:
    """List experiments with their best results."""
    q = request.GET.get("q", "").strip()
    visible = selectors.experiments_visible_to(user=request.user)
    shown: list[Any] = list((visible.filter(name__icontains=q) if q else visible)[:SHOWN])
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
    """Show an experiment and its runs."""
    item = selectors.experiment_get(user=request.user, id=id)
    runs = selectors.run_list(user=request.user, experiment=item.pk, limit=RUNS)
    sparks = telemetry.sparkline(run_ids=[run.pk for run in runs], name="loss")
    lowest = best_values(runs, sparks)
    best = best_of(runs, lowest)
    rows = [
        {**row(run, sparks.get(run.pk, [])), "lowest": _lowest(lowest.get(run.pk))} for run in runs
    ]
    context = {
        "item": item,
        "rows": rows,
        "best": best,
        "sentence": sentence(runs, best),
        "notes": render_markdown(item.notes),
        "may_edit": item.owner_id == request.user.pk or has_role(request.user, Role.OPERATOR),
        "more": len(runs) == RUNS,
        "may_create": _may_create(request),
    }
    return render(request, "webui/experiment.html", context)


@page
@require_http_methods(["GET", "POST"])
def create(request: PageRequest) -> HttpResponse:
    """Create an experiment."""
    if request.method == "POST":
        try:
            created = services.experiment_create(
                owner=request.user, **_typed(request, "name", "hypothesis", "notes")
            )
        except Refusal as refusal:
            return _form(request, refusal=refusal)
        return redirect_with_message(
            request,
            _("Experiment %(name)s created. Submit its first run.") % {"name": created.name},
            "experiment",
            created.pk,
        )
    return _form(request)


@page
@require_http_methods(["GET", "POST"])
def edit(request: PageRequest, id: int) -> HttpResponse:
    """Edit the hypothesis and notes of an experiment."""
    item = selectors.experiment_get(user=request.user, id=id)
    if item.owner_id != request.user.pk and not has_role(request.user, Role.OPERATOR):
        raise forbidden(
            _("%(name)s belongs to %(owner)s; only its owner and operators can edit it.")
            % {"name": item.name, "owner": item.owner.username}
        )
    if request.method == "POST":
        try:
            services.experiment_update(
                experiment=item, by=request.user, **_typed(request, "hypothesis", "notes")
            )
        except Refusal as refusal:
            return _form(request, item=item, refusal=refusal)
        return redirect_with_message(request, _("Saved."), "experiment", item.pk)
    return _form(request, item=item)


def best_values(
    runs: Iterable[Any], losses: dict[int, list[float]]
) -> dict[int, tuple[str, float]]:
    """Return `{run: (metric, lowest value)}` of `val_loss`, else of `loss`."""
    validated = telemetry.sparkline(run_ids=[run.pk for run in runs], name="val_loss")
    lowest: dict[int, tuple[str, float]] = {}
    for metric, curves in (("loss", losses), ("val_loss", validated)):
        for id, values in curves.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                lowest[id] = (metric, min(finite))
    return lowest


def best_of(runs: Iterable[Any], lowest: dict[int, tuple[str, float]]) -> Best | None:
    """Return the run with the lowest validation loss, else the lowest training loss."""
    known = [(run, *lowest[run.pk]) for run in runs if run.pk in lowest]
    validated = [entry for entry in known if entry[1] == "val_loss"]
    if not known:
        return None
    run, metric, value = min(validated or known, key=lambda entry: entry[2])
    return Best(run, metric, value)


def sentence(runs: list[Any], best: Best | None) -> str:
    """Summarize an experiment in one sentence."""
    if not runs:
        return _("No runs yet.")
    active = sum(run.state in ("starting", "running", "stopping") for run in runs)
    text = ngettext("%(count)s run", "%(count)s runs", len(runs)) % {"count": f"{len(runs):,}"}
    if active:
        text += _(", %(count)s active") % {"count": active}
    if best is None:
        return text + _("; no loss logged yet.")
    return text + _("; best so far: %(metric)s %(value)s by run %(id)s %(name)s.") % {
        "metric": best.title,
        "value": formatting.quantity(best.value, 4),
        "id": best.run.pk,
        "name": best.run.name,
    }


def _lowest(entry: tuple[str, float] | None) -> tuple[str, float] | None:
    return (metric_title(entry[0]), entry[1]) if entry else None


def _may_create(request: PageRequest) -> bool:
    return has_role(request.user, Role.SUBMITTER)


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
