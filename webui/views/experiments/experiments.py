"""Experiment pages: hypothesis, notes, runs and the best result."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_http_methods

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, forbidden
from orchestrator.runs import selectors, services
from orchestrator.telemetry import selectors as telemetry
from webui.panels.pinned_panels import pinned_panels
from webui.presentation import formatting
from webui.presentation.markdown import render_markdown
from webui.views.access import PageRequest, field_errors, has_role, page, redirect_with_message
from webui.views.experiments.experiment_ranking import Best, best_runs, best_values, metric_title
from webui.views.runs.compare import MOST as COMPARED
from webui.views.runs.runs import rows, sparklines

SHOWN = 100
RUNS = 200  # of an experiment, newest first


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
    values = best_values(every, _curves)
    rows = [
        {"item": item, "best": next(iter(best_runs(by_experiment.get(item.pk, []), values)), None)}
        for item in shown
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
    sparks = sparklines(runs)
    values = best_values(runs, _curves)
    best = best_runs(runs, values)
    shown = [
        {**row, "own": _titled(values.get(run.pk))}
        for run, row in zip(runs, rows(runs, sparks), strict=True)
    ]
    context = {
        "item": item,
        "rows": shown,
        "best": best,
        "compared": ",".join(str(run.pk) for run in runs[:COMPARED]) if len(runs) > 1 else "",
        "best_ids": [each.run.pk for each in best],
        "sentence": sentence(runs, next(iter(best), None)),
        "notes": render_markdown(item.notes),
        "may_edit": services.may_edit_experiment(item, request.user),
        "more": len(runs) == RUNS,
        "may_create": _may_create(request),
        **pinned_panels(request.user, experiment=item),
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
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
    if not services.may_edit_experiment(item, request.user):
        raise forbidden(
            _(
                "%(name)s belongs to %(owner)s; only its owner, operators and those of a shared "
                "team can edit it."
            )
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


def sentence(runs: list[Any], best: Best | None) -> str:
    """Summarize an experiment in one sentence."""
    if not runs:
        return _("No runs yet.")
    active = sum(run.state in ("starting", "running", "stopping") for run in runs)
    text = ngettext("%(count)s run", "%(count)s runs", len(runs)) % {"count": f"{len(runs):,}"}
    if active:
        text += _(", %(count)s active") % {"count": active}
    if best is None:
        return text + _("; no result logged yet.")
    return text + _("; best so far: %(metric)s %(value)s by run %(id)s %(name)s.") % {
        "metric": best.title,
        "value": formatting.quantity(best.value, 4),
        "id": best.run.pk,
        "name": best.run.name,
    }


def _curves(run_ids: list[int], name: str) -> dict[int, list[float]]:
    return telemetry.sparkline(run_ids=run_ids, name=name)


def _titled(entry: tuple[str, float] | None) -> tuple[str, float] | None:
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
