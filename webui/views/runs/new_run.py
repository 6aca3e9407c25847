"""New-run page: a spec as form fields, JSON and curl; checks it while typing and submits it."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.fleet import selectors as fleet
from orchestrator.runs import selectors, services
from orchestrator.runs.outputs import endpoint
from orchestrator.runs.submission import weights
from orchestrator.runs.submission.examples.example_preview import example_files
from webui.forms import forecast, spec_summary
from webui.forms.data_set_choices import input_choices, with_data_sets
from webui.forms.finetuning_examples import FINETUNING_EXAMPLES
from webui.forms.forecast_produce import produce_facts
from webui.forms.form_sections import field_table, form_section
from webui.forms.pool_choices import pool_choices
from webui.forms.spec_fields import (
    KIND,
    SECTIONS,
    SMOLLM2,
)
from webui.forms.spec_form import spec_of, values_of
from webui.views.access import PageRequest, has_role, page
from workers.contracts.catalog.presets import PRESETS

START: dict[str, Any] = {
    "kind": "train",
    "model": "llama-tiny",
    "data": {"preset": "shakespeare"},
    "plan": {
        "dp": 1,
        "zero": 0,
        "precision": "fp32",
        "micro_batch_size": 8,
        "global_batch_size": 8,
    },
    "train": {
        "steps": 200,
        "seq_len": 128,
        "optimizer": {"lr": 0.003},
        "lr_schedule": {"name": "cosine", "warmup_steps": 20},
        "eval": {"every_steps": 50},
        "clip_norm": 1.0,
    },
}
_MOST_CHECKPOINTS = 20
_SERVERS = 20  # the newest, searched for one that answers messages
# initial specs of inference runs; they work once the weights are fetched
EXAMPLES: dict[str, dict[str, Any]] = {
    "serve": {"serve": {}},
    "generate": {
        "generate": {
            "input": "examples/prompts.jsonl",
            "output": "answers.jsonl",
            "max_new_tokens": 64,
            "temperature": 0,
        },
    },
    "evaluate": {
        "evaluate": {"metrics": ["loss", "perplexity", "bits_per_byte"], "max_tokens": 8192}
    },
}


@page
@require_http_methods(["GET", "POST"])
def new_run(request: PageRequest) -> HttpResponse:
    """GET shows a default, preset or earlier run's spec; POST submits it or shows its errors."""
    if request.method == "GET":
        name, experiment, spec, like = _initial(request)
        return render(
            request, "webui/new_run.html", _context(request, name, experiment, spec, like=like)
        )
    name, experiment = request.POST.get("name", ""), request.POST.get("experiment", "")
    submitted: dict[str, Any] | None = None
    try:
        submitted = _submitted_spec(request)
        run = services.run_submit(
            owner=request.user,
            name=spec_summary.run_name(name, submitted),
            spec=submitted,
            experiment=experiment.strip() or None,
            force=bool(request.POST.get("force")),
        )
    except Refusal as refusal:
        context = _context(request, name, experiment, submitted or {}, refusal=refusal)
        if submitted is None:  # keep invalid JSON as typed
            context["spec_text"] = request.POST.get("spec", "")
        return render(request, "webui/new_run.html", context, status=refusal.status)
    messages.success(request, _("Run %(id)s submitted.") % {"id": run.pk})
    return redirect(f"/runs/{run.pk}/")


@page
@require_POST
def check(request: PageRequest) -> HttpResponse:
    """Render the check of a spec: its problems or its size and forecast; creates nothing."""
    try:
        spec = _submitted_spec(request)
    except Refusal as refusal:
        return render(
            request,
            "webui/run_check.html",
            {"problems": spec_summary.with_field_ids(refusal.errors)},
        )
    name, experiment = request.POST.get("name", ""), request.POST.get("experiment", "")
    return render(request, "webui/run_check.html", _verdict(request, name, experiment, spec))


def _initial(request: PageRequest) -> tuple[str, str, dict[str, Any], Any]:
    """Return `(name, experiment, spec, similar run)` for the query."""
    like, preset = request.GET.get("like", ""), request.GET.get("preset", "")
    experiment = request.GET.get("experiment", "")[:120]
    if like:
        run = selectors.run_get(user=request.user, id=like)
        return (
            run.name,
            experiment or (run.experiment.name if run.experiment else ""),
            run.spec,
            run,
        )
    if text := request.GET.get("spec", ""):  # a link of the planner
        spec = _json(text)
        name = request.GET.get("name", "")[:160]
        return name, experiment, _completed(spec) if spec.get("kind") == "train" else spec, None
    spec = {**START, "model": preset} if preset in PRESETS else START
    if (example := request.GET.get("example", "")) in FINETUNING_EXAMPLES:
        return "", experiment, FINETUNING_EXAMPLES[example][1], None
    kind = request.GET.get("kind", "train")
    if kind == "benchmark":
        spec = {name: spec[name] for name in ("model", "data", "plan")} | {
            "kind": kind,
            "benchmark": {},
        }
    if kind in EXAMPLES:
        spec = {"kind": kind, "model": {"package": SMOLLM2}, **EXAMPLES[kind]}
    if kind == "produce":
        spec = {
            "kind": kind,
            "produce": {
                "tasks": ["open_qa"],
                "count": 100,
                "server": _serving(request),
            },
        }
    if kind in ("script", "external"):
        spec = (
            {"kind": "script", "resources": {"devices": 1}}
            if kind == "script"
            else {"kind": "external"}
        )
    return "", experiment, spec, None


def _completed(spec: dict[str, Any]) -> dict[str, Any]:
    """A training spec with the form's initial values where it has none.

    Initial weights determine the model.
    """
    train = spec.get("train")
    start = dict(START)
    if isinstance(train, dict) and train.get("init_from") is not None:
        del start["model"]
    return {**start, **spec}


def _serving(request: PageRequest) -> dict[str, Any]:
    """The newest serve run that has not ended and may answer messages, or a URL to fill in."""
    states = ("running", "starting", "queued")
    for run in selectors.run_list(user=request.user, kind="serve", state=states, limit=_SERVERS):
        serving = endpoint.status(run=run).serving
        if serving is None or serving.chat:
            return {"run": run.pk}
    return {"url": "http://127.0.0.1:8000/v1", "model": "model"}


def _submitted_spec(request: PageRequest) -> dict[str, Any]:
    """Return the spec of a POST: the fields over the JSON, or only the JSON if edited last."""
    text = request.POST.get("spec", "").strip()
    base = _json(text) if text else {}
    alone = request.POST.get("from") == "json" or request.POST.get("submit") == "json"
    return base if alone else spec_of(request.POST, base)


def _json(text: str) -> dict[str, Any]:
    """Parse an object; raises Refusal 422."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid_json(_("invalid JSON: %(error)s") % {"error": error}) from None
    if not isinstance(value, dict):
        raise _invalid_json(_("the spec must be a JSON object"))
    return value


def _invalid_json(message: str) -> Refusal:
    return Refusal(
        "spec-invalid",
        _("Invalid spec"),
        422,
        message,
        [
            {
                "field": "spec",
                "message": message,
                "hint": _("Use an object such as %(example)s.")
                % {"example": '{"kind": "train", ...}'},
            }
        ],
    )


def _verdict(
    request: PageRequest, name: str, experiment: str, spec: dict[str, Any]
) -> dict[str, Any]:
    forecasted = services.spec_preview(spec, by=request.user)
    problems = forecasted["problems"]
    url = request.build_absolute_uri("/api/v1/runs")
    model = {"model": forecasted["model"]} if forecasted["model"] else {}
    size = spec_summary.summarize_spec(
        {**model, **spec},
        problems,
        fleet_devices=fleet.capacity(),
        teacher=forecasted["teacher"],
    )
    size["facts"] += produce_facts(forecasted["produce"])
    missing = [name for name in spec_summary.packages(spec) if not weights.package_here(name)]
    if missing:
        size["notes"].insert(
            0,
            _(
                "The weights of %(package)s are not on this machine. Fetch them on every node "
                "first (93 MB, verified): %(command)s"
            )
            % {"package": missing[0], "command": weights.FETCH},
        )
    return {
        "problems": spec_summary.with_field_ids(problems),
        **size,
        "forecast": forecast.describe(spec, forecasted),
        "sizes_hint": forecast.sizes_hint(forecasted),
        "forced": bool(request.POST.get("force")),
        "curl": spec_summary.curl(url, name, experiment, spec),
        "recorder": spec_summary.recorder_lines(request.build_absolute_uri("/"), name, experiment),
    }


def _context(
    request: PageRequest,
    name: str,
    experiment: str,
    spec: dict[str, Any],
    like: Any = None,
    refusal: Refusal | None = None,
) -> dict[str, Any]:
    values = values_of(spec)
    errors = spec_summary.by_field(refusal.errors) if refusal else {}
    kind = values["kind"]
    kinds = (
        KIND.choices
        if kind in dict(KIND.choices)
        else (*KIND.choices, (kind, _("%(kind)s: as JSON") % {"kind": kind}))
    )
    return {
        "name": name,
        "experiment": experiment,
        "spec_text": json.dumps(spec, indent=2),
        "like": like,
        "refusal": refusal,
        "errors": errors,
        "kind": {
            "field": KIND,
            "label": _(KIND.label),
            "help": "",
            "value": kind,
            "choices": [(name, _(label)) for name, label in kinds],
            "placeholder": "",
            "errors": errors.get("kind", []),
        },
        "sections": with_data_sets(
            [form_section(section, values, errors, kind) for section in SECTIONS], user=request.user
        ),
        "experiments": selectors.experiments_visible_to(user=request.user)[:50],
        "pools": pool_choices(),
        "models": [*weights.offered(), *_checkpoints(request.user)],
        "files": example_files() if has_role(request.user, Role.SUBMITTER) else [],
        "inputs": input_choices(user=request.user),
        "examples": [(name, _(title)) for name, (title, _spec) in FINETUNING_EXAMPLES.items()],
        "table": field_table(),
        **_verdict(request, name, experiment, spec),
    }


def _checkpoints(user: Any) -> list[tuple[str, str]]:
    """Newest checkpoints of recent runs, as models for a form."""
    rows = selectors.newest_checkpoints(user=user, limit=_MOST_CHECKPOINTS)
    return [
        (
            row.path,
            _("run %(id)s %(name)s, step %(step)s")
            % {"id": row.run_id, "name": row.run.name, "step": f"{row.step:,}"},
        )
        for row in rows
    ]
