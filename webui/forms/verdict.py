"""What the form says beside a spec: its problems by field, what the run amounts to, the same by
curl and recorder.

Pure; the problems themselves come from the service that would refuse the run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from webui.forms.spec_fields import ANSWERS, FIELDS, KIND
from webui.presentation import formatting
from workers.contracts import ParallelPlan, RunSpec
from workers.contracts.catalog.counts import flops_per_token, parameter_count
from workers.contracts.specs.benchmark import turns
from workers.contracts.specs.benchmark_variants import expand, total_steps
from workers.contracts.specs.training_support import ENGINE_RUNS, beyond_engine

_KNOWN = {field.path for field in FIELDS} | {"name", "experiment", "spec", KIND.path}


def field_of(path: str) -> str:
    """The form's field that a problem's path belongs to: itself, or the nearest above it; empty
    where there is none.
    """
    path = path.removeprefix("spec.")
    while path and path not in _KNOWN:
        path = path.rpartition(".")[0]
    return path


def placed(problems: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """The problems, each with the form's field it belongs to as `id`."""
    found = []
    for item in problems:
        path = item["field"].removeprefix("spec.")
        found.append({**item, "field": path, "id": field_of(path).replace(".", "-") or "kind"})
    return found


def by_field(problems: Iterable[Mapping[str, str]]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for item in problems:
        found.setdefault(field_of(item["field"]), []).append(dict(item))
    return found


def amounts(
    spec: Mapping[str, Any], problems: list[dict[str, str]], *, fleet_devices: int
) -> dict[str, Any]:
    """`headline`, `facts` (pairs) and `notes`: what the run would be, where the spec can be read at
    all.
    """
    try:
        run = RunSpec.from_dict(spec)
    except ValidationError:
        return {"headline": "", "facts": [], "notes": []}
    facts: list[tuple[str, str]] = []
    notes: list[str] = []
    if run.kind == "external":
        facts.append(("Devices", "none of this fleet"))
        return {"headline": "It will be watched, not launched", "facts": facts, "notes": notes}
    plan = run.plan if isinstance(run.plan, ParallelPlan) and run.plan_given else None
    devices = run.resources.devices or (plan.world_size if plan else 1)
    if run.kind == "train" and run.train is not None:
        facts += _training(run, plan, devices)
    if run.benchmark is not None:
        facts += _benchmark(run)
    facts.append(
        ("Devices", f"{devices} of the fleet's {fleet_devices}" if fleet_devices else f"{devices}")
    )
    if not problems and run.kind in ("train", "benchmark") and (beyond := beyond_engine(run)):
        notes.append(
            f"Orrery's engine does not run {formatting.listed(beyond)} yet: the run would end at its "
            "start and say so. "
            f"It runs {ENGINE_RUNS}."
        )
    if not problems and devices > fleet_devices:
        have = formatting.count(fleet_devices, "device") if fleet_devices else "no device"
        notes.append(
            f"The fleet has {have} now, so the run will wait in the queue until {devices} are "
            "there."
        )
    return {"headline": "Ready to submit", "facts": facts, "notes": notes}


def package(spec: Mapping[str, Any]) -> str:
    """The package that the weights are asked of, "" where they are not."""
    model = spec.get("model")
    found = model.get("package") if isinstance(model, Mapping) else None
    return found if isinstance(found, str) and spec.get("kind") in ANSWERS else ""


def _training(run: RunSpec, plan: ParallelPlan | None, devices: int) -> list[tuple[str, str]]:
    assert run.train is not None
    train, shape = run.train, run.shape
    batch = plan.global_batch_size if plan else devices * (train.accumulate or 1)
    tokens = batch * train.seq_len
    facts = []
    if shape is not None:
        count = parameter_count(shape)
        facts.append(("Model", f"{formatting.quantity(count.total)} parameters"))
    if plan is None:
        ranks = "one device" if devices == 1 else f"data parallel over {devices} devices"
        facts.append(("Plan", f"{ranks}, fp32, micro-batch 1"))
    elif plan.global_batch_size % (plan.micro_batch_size * plan.dp) == 0:
        rounds = formatting.count(plan.accumulation, "micro-batch", "micro-batches")
        facts.append(("Plan", f"{formatting.plan_sentence(plan.to_dict())}; {rounds} a rank"))
    facts.append(("A step", f"{batch:,} sequences × {train.seq_len:,} = {tokens:,} tokens"))
    facts.append(
        ("In all", f"{train.steps:,} steps, {formatting.quantity(tokens * train.steps)} tokens")
    )
    if shape is not None:
        total = flops_per_token(shape, train.seq_len) * tokens * train.steps
        facts.append(("Work", flops(total)))
    return facts


def _benchmark(run: RunSpec) -> list[tuple[str, str]]:
    """What would be measured; without a plan in numbers the planner chooses the base first."""
    assert run.benchmark is not None
    if not isinstance(run.plan, ParallelPlan):
        return [("Variants", "of the plan that the planner chooses")]
    found = expand(run)
    names = dict.fromkeys(each.technique.replace("_", " ") for each in found.variants[1:])
    more = ", ".join([*names, *found.devices])
    facts = [
        ("Variants", f"the base and {len(found.variants) - 1} more" + (f": {more}" if more else ""))
    ]
    if found.left_out:
        facts.append(
            (
                "Left out",
                "; ".join(f"{each['name']}: {each['reason']}" for each in found.left_out[:4]),
            )
        )
    facts.append(
        (
            "In all",
            f"{total_steps(run):,} steps in {formatting.count(turns(run.benchmark), 'turn')}",
        )
    )
    return facts


def flops(total: float) -> str:
    """`1.36 TFLOP`: floating-point operations with a metric prefix."""
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


def named(name: str, spec: Mapping[str, Any]) -> str:
    """The name as typed; kind and model where it was left empty."""
    if name.strip():
        return name
    kind, model = str(spec.get("kind", "run")), spec.get("model")
    if kind in ANSWERS and isinstance(model, Mapping):
        where = str(model.get("path") or model.get("package") or "")
        return f"{kind} {where.rstrip('/').rsplit('/', 1)[-1]}".strip()[:160]
    if kind == "train" and model is not None:
        return f"{kind} {model if isinstance(model, str) else 'own shape'}"[:160]
    return kind


def curl(url: str, name: str, experiment: str, spec: Mapping[str, Any]) -> str:
    """The command that submits the very same run; the token stays a variable."""
    body = {
        "name": named(name, spec),
        **({"experiment": experiment} if experiment.strip() else {}),
        "spec": spec,
    }
    return (
        f"curl -X POST {shlex.quote(url)} \\\n"
        '  -H "Authorization: Bearer $ORRERY_TOKEN" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(json.dumps(body, indent=2, ensure_ascii=False))}"
    )


def recorder_lines(url: str, name: str, experiment: str) -> str:
    """What a foreign program adds to be recorded."""
    more = f", experiment={json.dumps(experiment)}" if experiment.strip() else ""
    return (
        "import orrery_recorder\n\n"
        f"run = orrery_recorder.init({json.dumps(url.rstrip('/'))}, token, "
        f"name={json.dumps(name or 'my run')}{more})\n"
        'run.log({"loss": loss}, step=step, tokens=tokens)  # in the loop\n'
        "run.finish()"
    )
