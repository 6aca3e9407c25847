"""Checks a spec: parse, resolve the plan, validate, predict. Writes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings
from pydantic import ValidationError

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.runs.datasets import resolve as data_sets
from orchestrator.runs.models import Run
from orchestrator.runs.outputs import produce_servers
from orchestrator.runs.plan_trials.candidates import (
    Candidates,
    candidates_of,
    open_plan_problems,
)
from orchestrator.runs.submission import script_secrets
from orchestrator.runs.submission.absolute_paths import with_absolute_paths
from orchestrator.runs.submission.data_paths import path_problems
from orchestrator.runs.submission.device_numbers.device_split import choose_split
from orchestrator.runs.submission.device_numbers.elastic_sizes import elastic_sizes, range_problems
from orchestrator.runs.submission.prediction.serving import predict_serving
from orchestrator.runs.submission.prediction.training import Prediction, predict_training
from orchestrator.runs.submission.prediction.whole_run import whole_run
from orchestrator.runs.submission.resolve import ResolvedPlan, resolve_plan
from orchestrator.runs.submission.run_paths import run_path_problems
from orchestrator.runs.submission.target_hardware import (
    TargetHardware,
    support_problems,
    target_hardware_for,
)
from orchestrator.runs.submission.weights import (
    lacks_teacher_shape,
    models_root,
    no_checkpoint_problems,
    served_adapter_problems,
    shape_of,
    shape_problems,
    teacher_shape,
    with_shape,
)
from workers.contracts import (
    ModelSpec,
    ParallelPlan,
    Problem,
    RunSpec,
    spec_problems,
    validation_problems,
)
from workers.contracts.specs.benchmarks.techniques import as_training, technique_problems
from workers.contracts.specs.inference_support import (
    INFERENCE_KINDS,
    inference_problems,
    reward_model_problems,
)
from workers.contracts.specs.training_support import combination_problems

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedSpec:
    """A checked spec: parsed, its plan resolved, as stored, its problems and prediction.

    `misfits`: the plan is predicted not to fit the pool's devices, with changes that would fit.
    Empty if it fits, if the pool's devices are unknown, and for runs without prediction.
    `unsupported`: what no node of the pool can do. `sizes` of an elastic run, largest first.
    `candidates` are the plans to try.
    """

    spec: RunSpec | None = None
    resolved: ResolvedPlan | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    prediction: Prediction | None = None
    misfits: list[Problem] = field(default_factory=list)
    unsupported: list[Problem] = field(default_factory=list)
    sizes: list[dict[str, Any]] = field(default_factory=list)
    candidates: Candidates = field(default_factory=Candidates)


def check(spec: Any, *, by: User | None) -> CheckedSpec:
    """Check a spec in this order: parse, run paths, plan, fields, prediction. Writes nothing.

    `by` is the submitter: paths in the folder of a run need the right to see that run. None: a
    local command, which may use all runs.

    A spec is stored without defaults, so a clone uses the defaults of its own time.
    """
    if not isinstance(spec, dict):
        hint = 'Use {"kind": "train", ...}.'
        return CheckedSpec(
            problems=[Problem(field="spec", message="the spec is not an object", hint=hint)]
        )
    spec, unknown = data_sets.with_data_sets(spec, by=by)
    try:
        parsed = _parse(spec)
    except ValidationError as error:
        return CheckedSpec(problems=[*unknown, *validation_problems(error)])
    if unknown:
        return CheckedSpec(parsed, problems=unknown)
    if hidden := _hidden_runs(parsed, by):  # before anything reads those runs
        return CheckedSpec(parsed, problems=hidden)
    if parsed.shape_source is not None and not _path_problems(parsed):
        parsed = with_shape(parsed)
    training = as_training(parsed)  # of a benchmark: its base
    planned = training.kind in ("train", *INFERENCE_KINDS)
    hardware = target_hardware_for(training) if planned else None
    teacher = teacher_shape(training)
    split = choose_split(training, hardware, teacher)
    if split.spec is not training:
        parsed = training = split.spec
    resolved = resolve_plan(training, hardware, teacher)
    complete = parsed.model_copy(update={"plan": resolved.plan}) if resolved.plan else parsed
    problems = [
        *(
            split.problems
            or resolved.problems
            or spec_problems(complete)
            or combination_problems(complete)
            or range_problems(complete)
        ),
        *open_plan_problems(parsed, automatic=resolved.automatic),
        *(technique_problems(complete.benchmark) if complete.benchmark is not None else []),
        *(inference_problems(complete) if complete.kind in INFERENCE_KINDS else []),
        *(_path_problems(complete) or _weights_problems(complete)),
        *produce_servers.server_problems(complete, by=by),
    ]
    stored = parsed.model_dump(mode="json", exclude_unset=True)
    problems += script_secrets.problems(stored, by=by)
    unsupported = support_problems(parsed)
    if problems or hardware is None:
        return CheckedSpec(parsed, resolved, stored, problems, unsupported=unsupported)
    prediction = _predict(as_training(complete), resolved, hardware, teacher)
    if split.splits and prediction is not None:
        prediction.document["splits"] = [each.to_dict() for each in split.splits]
        resolved = replace(resolved, how=f"{split.how} {resolved.how}")
    misfits = prediction.problems(hardware) if prediction is not None else []
    elastic = elastic_sizes(complete, hardware, teacher)
    misfits += elastic.misfits
    tried = _candidates(complete, resolved, hardware, teacher, prediction)
    return CheckedSpec(
        parsed,
        resolved,
        stored,
        tried.problems,
        prediction,
        misfits,
        unsupported,
        elastic.sizes,
        tried,
    )


def _candidates(
    spec: RunSpec,
    resolved: ResolvedPlan,
    hardware: TargetHardware,
    teacher: ModelSpec | None,
    prediction: Prediction | None,
) -> Candidates:
    """The plans that a run with autotune tries; the prediction gets what trials will take."""
    if spec.autotune is None:
        return Candidates()
    document = prediction.document if prediction is not None else {}
    whole = document.get("whole_run") or {}

    def predict(plan: ParallelPlan) -> dict[str, Any] | None:
        unknown = lacks_teacher_shape(spec)
        result = predict_training(spec, plan, hardware, teacher, unknown_teacher=unknown)
        return result.document if result is not None else None

    start_s = (whole.get("terms") or {}).get("start_s", 0.0)
    tried = candidates_of(spec, resolved.candidates, predict=predict, start_s=start_s)
    if tried.plans and whole:
        pool = spec.resources.pool or "default"
        document["whole_run"] = whole_run(document, spec, pool=pool, trials_s=tried.seconds)
    return tried


def _weights_problems(spec: RunSpec) -> list[Problem]:
    """Weights and adapters that do not suit the run, once their paths are allowed."""
    shape = shape_of(spec.model) if spec.kind in INFERENCE_KINDS else None
    return [
        *no_checkpoint_problems(spec),
        *shape_problems(spec),
        *served_adapter_problems(spec),
        *reward_model_problems(spec, shape),
    ]


def _parse(spec: dict[str, Any]) -> RunSpec:
    roots, models = settings.DATA_ROOTS, models_root()
    return RunSpec.from_dict(with_absolute_paths(spec, data_roots=roots, models_root=models))


def _hidden_runs(spec: RunSpec, by: User | None) -> list[Problem]:
    owners = people.visible_owners(by) if by is not None else None
    if owners is None or spec.kind == "external":
        return []
    return run_path_problems(
        spec.model_dump(mode="json", exclude_unset=True),
        roots=[*settings.DATA_ROOTS, models_root(), settings.ENV.home],
        run_root=settings.ENV.media_runs,
        may_see=lambda id: Run.objects.filter(pk=id, owner__in=owners).exists(),
    )


def _path_problems(spec: RunSpec) -> list[Problem]:
    if spec.kind == "external":
        return []
    given = spec.model_dump(mode="json", exclude_unset=True)
    return path_problems(
        spec,
        data_roots=settings.DATA_ROOTS,
        run_root=settings.ENV.media_runs,
        models_root=models_root(),
        elsewhere=data_sets.paths_elsewhere(given),
        texts=data_sets.paths_of_texts(given),
    )


def _predict(
    spec: RunSpec,
    resolved: ResolvedPlan,
    hardware: TargetHardware,
    teacher: ModelSpec | None,
) -> Prediction | None:
    """None also if the planner fails: a submission does not depend on its prediction."""
    if resolved.plan is None:
        return None
    try:
        if spec.kind in INFERENCE_KINDS:
            return predict_serving(spec, resolved.plan, hardware)
        unknown = lacks_teacher_shape(spec)
        result = predict_training(spec, resolved.plan, hardware, teacher, unknown_teacher=unknown)
        if result is not None:
            pool = spec.resources.pool or "default"
            result.document["whole_run"] = whole_run(result.document, spec, pool=pool)
        return result
    except Exception:
        log.exception("the planner failed on a spec; it is accepted without a prediction")
        return None
