"""Pages of sweeps: the list, one sweep with its charts, the form, cancel."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors as runs
from orchestrator.sweeps import selectors, services
from webui.charts.sweep_charts import best_so_far, parallel_coordinates
from webui.forms.sweep_form import INITIAL, definition_of
from webui.presentation import formatting
from webui.views.access import PageRequest, has_role, page, redirect_with_message, require_role

SHOWN = 100
METHODS = {
    "tpe": gettext_noop("TPE: a model of good points proposes the next (Optuna)"),
    "random": gettext_noop("random points"),
    "grid": gettext_noop("grid: every combination of values"),
    "asha": gettext_noop("ASHA: pause at rungs, continue the best"),
    "pbt": gettext_noop("PBT: the worst continue from checkpoints of the best, perturbed"),
}


@page
@require_GET
def sweeps(request: PageRequest) -> HttpResponse:
    """List sweeps with their best results."""
    rows: list[dict[str, Any]] = []
    for item in selectors.sweeps_visible_to(user=request.user)[:SHOWN]:
        trials = selectors.trials_of(item)
        definition = selectors.definition_of(item)
        rows.append(
            {
                "item": item,
                "definition": definition,
                "best": selectors.best_of(item, trials),
                "runs": sum(trial.run_id is not None for trial in trials),
            }
        )
    running = sum(row["item"].state == "running" for row in rows)
    context = {
        "rows": rows,
        "running": running,
        "may_create": has_role(request.user, Role.SUBMITTER),
    }
    return render(request, "webui/sweeps.html", context)


@page
@require_GET
def sweep(request: PageRequest, id: int) -> HttpResponse:
    """Show a sweep: best so far, parallel coordinates, importance, trials; part of it for htmx."""
    item = selectors.sweep_get(user=request.user, id=id)
    definition, trials = selectors.definition_of(item), selectors.trials_of(item)
    best = selectors.best_of(item, trials)
    minimize = definition.metric.goal == "minimize"
    shares = selectors.importance_of(item, trials)
    context = {
        "item": item,
        "definition": definition,
        "method": _(METHODS[definition.method]),
        "trials": [_trial_row(trial, trial is best) for trial in reversed(trials)],
        "best": best,
        "best_parameters": _parameters(best.parameters) if best is not None else [],
        "names": [path.rpartition(".")[2] for path in definition.parameters],
        "sentence": sentence(item, definition, trials, best),
        "parallel": parallel_coordinates(
            definition.parameters, trials, metric=definition.metric.name, minimize=minimize
        ),
        "so_far": best_so_far(trials, minimize=minimize),
        "importance": [{"path": path, "share": share} for path, share in shares.items()],
        "hours": selectors.device_hours(item),
        "may_cancel": item.state == "running" and services.may_manage(item, request.user),
        "finished_ids": ",".join(
            str(trial.run_id) for trial in trials if trial.state == "finished" and trial.run_id
        ),
        "spec": json.dumps(definition.spec, indent=2),
    }
    template = "webui/sweep_parts.html" if request.htmx else "webui/sweep.html"
    return render(request, template, context)


@page
@require_http_methods(["GET", "POST"])
def create(request: PageRequest) -> HttpResponse:
    """Start a sweep from the form; `?run=12` starts from the spec of a run."""
    require_role(request.user, Role.SUBMITTER, _("Starting sweeps"))
    if request.method == "POST":
        fields = {name: request.POST.get(name, "") for name in INITIAL}
        try:
            created = services.sweep_create(
                owner=request.user, name=fields["name"], definition=definition_of(fields)
            )
        except Refusal as refusal:
            return _form(request, fields, refusal)
        message = _("Sweep %(name)s started. Its first runs start within seconds.")
        return redirect_with_message(request, message % {"name": created.name}, "sweep", created.pk)
    fields = dict(INITIAL)
    if request.GET.get("run", "").isdecimal():
        run = runs.run_get(user=request.user, id=request.GET["run"])
        spec = {**run.spec, "plan": run.plan} if run.plan else run.spec
        fields |= {"spec": json.dumps(spec, indent=2), "name": run.name[:100]}
    return _form(request, fields, None)


@page
@require_POST
def cancel(request: PageRequest, id: int) -> HttpResponse:
    """Cancel a sweep with its runs."""
    item = selectors.sweep_get(user=request.user, id=id)
    services.sweep_cancel(sweep=item, by=request.user)
    return redirect_with_message(request, _("Sweep cancelled."), "sweep", item.pk)


def sentence(item: Any, definition: Any, trials: list[Any], best: Any) -> str:
    """What the sweep has reached so far, and why it ended."""
    count = sum(trial.run_id is not None for trial in trials)
    parts = [
        ngettext("%(count)s of %(most)s run", "%(count)s of %(most)s runs", definition.most_runs)
        % {"count": count, "most": definition.most_runs}
    ]
    active = sum(trial.state == "running" for trial in trials)
    paused = sum(trial.state == "paused" for trial in trials)
    if active:
        parts.append(_("%(count)s active") % {"count": active})
    if paused:
        parts.append(_("%(count)s paused") % {"count": paused})
    text = ", ".join(parts)
    if best is not None:
        text += "; " + _("best %(metric)s %(value)s by trial %(number)s") % {
            "metric": definition.metric.name,
            "value": formatting.quantity(best.value, 4),
            "number": best.number,
        }
    elif item.state == "running":
        text += "; " + _("no run has ended yet")
    return f"{text}. {item.message}".strip()


def _trial_row(trial: Any, is_best: bool) -> dict[str, Any]:
    return {
        "item": trial,
        "best": is_best,
        "parameters": _parameters(trial.parameters),
    }


def _parameters(parameters: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            path.rpartition(".")[2],
            formatting.quantity(value, 4)
            if isinstance(value, float) and not isinstance(value, bool)
            else str(value),
        )
        for path, value in sorted(parameters.items())
    ]


def _form(request: PageRequest, fields: dict[str, str], refusal: Refusal | None) -> HttpResponse:
    context = {
        "fields": fields,
        "refusal": refusal,
        "methods": [(name, _(text)) for name, text in METHODS.items()],
    }
    status = refusal.status if refusal is not None else 200
    return render(request, "webui/sweep_form.html", context, status=status)
