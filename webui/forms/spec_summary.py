"""Describes a spec next to the form: problems by field, size, notes, curl and recorder code.

Pure functions; the problems come from the service that validates the run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from pydantic import ValidationError

from webui.forms.spec_fields import ANSWERS, FIELDS, KIND
from webui.presentation import formatting
from workers.contracts import ModelSpec, ParallelPlan, RunSpec
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.model_flops import training_flops_per_token
from workers.contracts.specs.benchmarks.techniques import repeat_count
from workers.contracts.specs.benchmarks.variants import expand, total_steps
from workers.contracts.specs.training_support import ENGINE_RUNS, unsupported_features

_KNOWN = {field.path for field in FIELDS} | {"name", "experiment", "spec", KIND.path}


def field_of(path: str) -> str:
    """Return the form field of a problem's path: itself or its nearest parent, else empty."""
    path = path.removeprefix("spec.")
    while path and path not in _KNOWN:
        path = path.rpartition(".")[0]
    return path


def with_field_ids(problems: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the problems, each with the id of its form field."""
    result = []
    for item in problems:
        path = item["field"].removeprefix("spec.")
        result.append({**item, "field": path, "id": field_of(path).replace(".", "-") or "kind"})
    return result


def by_field(problems: Iterable[Mapping[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Group problems by form field."""
    groups: dict[str, list[dict[str, str]]] = {}
    for item in problems:
        groups.setdefault(field_of(item["field"]), []).append(dict(item))
    return groups


def summarize_spec(
    spec: Mapping[str, Any],
    problems: list[dict[str, str]],
    *,
    fleet_devices: int,
    teacher: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `headline`, `facts` (pairs) and `notes` of the run; empty for an invalid spec.

    `teacher` is the shape of a distillation's teacher, if known.
    """
    try:
        run = RunSpec.from_dict(spec)
    except ValidationError:
        return {"headline": "", "facts": [], "notes": []}
    facts: list[tuple[str, str]] = []
    notes: list[str] = []
    if run.kind == "external":
        facts.append((_("Devices"), _("no device of this fleet")))
        return {
            "headline": _("Orrery records this run but does not launch it"),
            "facts": facts,
            "notes": notes,
        }
    plan = run.plan if isinstance(run.plan, ParallelPlan) and run.has_explicit_plan else None
    devices = run.resources.devices or (plan.world_size if plan else 1) + run.rollout_devices
    if run.kind == "train" and run.train is not None:
        second = ModelSpec.from_dict(teacher) if teacher is not None else None
        facts += _training(run, plan, devices, second)
    if run.benchmark is not None:
        facts += _benchmark(run)
    facts.append(
        (
            _("Devices"),
            _("%(count)s of %(total)s in the fleet") % {"count": devices, "total": fleet_devices}
            if fleet_devices
            else f"{devices}",
        )
    )
    if (
        not problems
        and run.kind in ("train", "benchmark")
        and (beyond := unsupported_features(run))
    ):
        notes.append(
            _(
                "Orrery's engine does not support %(features)s yet; the run would fail at start. "
                "Supported: %(supported)s."
            )
            % {"features": formatting.listed(beyond), "supported": ENGINE_RUNS}
        )
    if not problems and devices > fleet_devices:
        fleet = ngettext(
            "The fleet has %(count)s device", "The fleet has %(count)s devices", fleet_devices
        ) % {"count": fleet_devices or _("no")}
        notes.append(
            _("%(fleet)s now; the run will wait in the queue until %(count)s are available.")
            % {"fleet": fleet, "count": devices}
        )
    return {"headline": _("Ready to submit"), "facts": facts, "notes": notes}


def packages(spec: Mapping[str, Any]) -> list[str]:
    """Return the packages of weights that the spec names, each once."""
    names: dict[str, None] = {}

    def search(value: Any) -> None:
        if isinstance(value, Mapping):
            if isinstance(name := value.get("package"), str):
                names[name] = None
            for inner in value.values():
                search(inner)

    search(spec)
    return list(names)


def _training(
    run: RunSpec, plan: ParallelPlan | None, devices: int, teacher: ModelSpec | None
) -> list[tuple[str, str]]:
    assert run.train is not None
    train, shape = run.train, run.trained_shape
    batch = plan.global_batch_size if plan else devices * (train.accumulate or 1)
    tokens = batch * train.seq_len
    facts = []
    if shape is not None:
        count = parameter_count(shape)
        facts.append(
            (
                _("Model"),
                _("%(count)s parameters") % {"count": formatting.quantity(count.total)},
            )
        )
    if plan is None:
        ranks = _("1 device")
        if devices > 1:
            ranks = _("data parallel over %(count)s devices") % {"count": devices}
        facts.append((_("Plan"), _("%(ranks)s, fp32, micro-batch 1") % {"ranks": ranks}))
    elif plan.global_batch_size % (plan.micro_batch_size * plan.dp) == 0:
        rounds = ngettext(
            "%(count)s micro-batch per rank",
            "%(count)s micro-batches per rank",
            plan.accumulation,
        ) % {"count": f"{plan.accumulation:,}"}
        facts.append((_("Plan"), f"{formatting.describe_plan(plan.to_dict())}; {rounds}"))
    facts.append(
        (
            _("Step"),
            _("%(batch)s sequences × %(length)s = %(tokens)s tokens")
            % {"batch": f"{batch:,}", "length": f"{train.seq_len:,}", "tokens": f"{tokens:,}"},
        )
    )
    facts.append(
        (
            _("Total"),
            _("%(steps)s steps, %(tokens)s tokens")
            % {"steps": f"{train.steps:,}", "tokens": formatting.quantity(tokens * train.steps)},
        )
    )
    if shape is not None:
        total = training_flops_per_token(shape, train, second=teacher) * tokens * train.steps
        facts.append((_("Compute"), flops(total)))
    return facts


def _benchmark(run: RunSpec) -> list[tuple[str, str]]:
    """Describe the variants; without an explicit plan the planner chooses the baseline."""
    assert run.benchmark is not None
    if not isinstance(run.plan, ParallelPlan):
        return [(_("Variants"), _("of the plan that the planner selects"))]
    expanded = expand(run)
    names = dict.fromkeys(variant.technique.replace("_", " ") for variant in expanded.variants[1:])
    more = ", ".join([*names, *expanded.devices])
    facts = [
        (
            _("Variants"),
            _("baseline and %(count)s more") % {"count": len(expanded.variants) - 1}
            + (f": {more}" if more else ""),
        )
    ]
    if expanded.left_out:
        facts.append(
            (
                _("Skipped"),
                "; ".join(f"{item['name']}: {item['reason']}" for item in expanded.left_out[:4]),
            )
        )
    facts.append(
        (
            _("Total"),
            _("%(steps)s steps in %(count)s rounds")
            % {"steps": f"{total_steps(run):,}", "count": repeat_count(run.benchmark)},
        )
    )
    return facts


def flops(total: float) -> str:
    """Format floating-point operations with a metric prefix: `1.36 TFLOP`."""
    for size, prefix in (
        (1e24, "Y"),
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
    ):
        if total >= size:
            return f"{total / size:.3g} {prefix}FLOP"
    return f"{total:.3g} FLOP"


def run_name(name: str, spec: Mapping[str, Any]) -> str:
    """Return the name as typed, else kind and model."""
    if name.strip():
        return name
    kind, model = str(spec.get("kind", "run")), spec.get("model")
    if kind in ANSWERS and isinstance(model, Mapping):
        where = str(model.get("path") or model.get("package") or "")
        return f"{kind} {where.rstrip('/').rsplit('/', 1)[-1]}".strip()[:160]
    if kind == "train" and model is not None:
        return f"{kind} {model if isinstance(model, str) else 'custom'}"[:160]
    return kind


def curl(url: str, name: str, experiment: str, spec: Mapping[str, Any]) -> str:
    """Return the curl command that submits the same run; the token is a shell variable."""
    body = {
        "name": run_name(name, spec),
        **({"experiment": experiment} if experiment.strip() else {}),
        "spec": _without_values(spec),
    }
    return (
        f"curl -X POST {shlex.quote(url)} \\\n"
        '  -H "Authorization: Bearer $ORRERY_TOKEN" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(json.dumps(body, indent=2, ensure_ascii=False))}"
    )


def _without_values(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec with "..." for each secret."""
    script = spec.get("script")
    if not isinstance(script, Mapping) or not isinstance(script.get("secrets"), Mapping):
        return spec
    return {**spec, "script": {**script, "secrets": dict.fromkeys(script["secrets"], "...")}}


def recorder_lines(url: str, name: str, experiment: str) -> str:
    """Return the code that records an external program."""
    more = f", experiment={json.dumps(experiment)}" if experiment.strip() else ""
    return (
        "import orrery_recorder\n\n"
        f"run = orrery_recorder.init({json.dumps(url.rstrip('/'))}, token, "
        f"name={json.dumps(name or _('my run'))}{more})\n"
        'run.log({"loss": loss}, step=step, tokens=tokens)  # in the loop\n'
        "run.finish()"
    )
