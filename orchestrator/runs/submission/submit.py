"""Checks a submitted spec and queues the run, or reports every problem and writes nothing."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from django.conf import settings
from django.db import transaction
from pydantic import ValidationError

from orchestrator.accounts import selectors as people
from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.common.redis import wake_scheduler
from orchestrator.runs import events, parameters, states
from orchestrator.runs.code import record
from orchestrator.runs.code.capture import Captured, capture, workdir_of
from orchestrator.runs.datasets import resolve as data_sets
from orchestrator.runs.models import Attempt, Checkpoint, Experiment, PlanTrials, Run, RunTag
from orchestrator.runs.outputs import produce_servers
from orchestrator.runs.outputs.produce_estimate import estimate_produce
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
from orchestrator.runs.submission.examples.template_problems import template_problems
from orchestrator.runs.submission.predict_serving import predict_serving
from orchestrator.runs.submission.predict_training import Prediction, predict_training
from orchestrator.runs.submission.predict_whole_run import whole_run
from orchestrator.runs.submission.resolve import ResolvedPlan, model_label, resolve_plan
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
from workers.contracts.base import as_sentences
from workers.contracts.specs.api_key_hash import hash_key
from workers.contracts.specs.benchmarks.techniques import as_training, technique_problems
from workers.contracts.specs.benchmarks.variants import total_steps
from workers.contracts.specs.inference_support import (
    INFERENCE_KINDS,
    inference_problems,
    reward_model_problems,
)
from workers.contracts.specs.training_support import combination_problems
from workers.contracts.wire.node_messages import AttemptState, RunState

log = logging.getLogger(__name__)

NAME_LENGTH = 160
SUBMITTER_PRIORITY = 100  # either way; operators have the range of the spec


def run_folder(run: Run) -> str:
    """The run's folder on its nodes, relative to each node's home."""
    return f"runs/{run.pk}"


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


def priority_problems(priority: int, *, by: User) -> list[Problem]:
    """At most one problem: a priority beyond the range of the user's role."""
    most = 1_000_000 if at_least(by.role, Role.OPERATOR) else SUBMITTER_PRIORITY
    if -most <= priority <= most:
        return []
    hint = f"Use a number from -{most} to {most}."
    if most == SUBMITTER_PRIORITY:
        hint += " Operators may set more."
    message = f"{priority} is beyond the range of your role"
    return [Problem(field="priority", message=message, hint=hint)]


def run_submit(
    *,
    owner: User,
    name: str,
    spec: dict[str, Any],
    experiment: Experiment | str | None = None,
    force: bool = False,
    forked_from: Run | None = None,
    resume_from: Checkpoint | None = None,
    code: Captured | None = None,
) -> Run:
    """Queue the run and wake the scheduler. An external run starts as running, with attempt 1.

    `experiment` is an object or a name; an unknown name creates one. The run continues from
    `resume_from`, a checkpoint of `forked_from`. `force` submits a plan that is predicted not to
    fit, or a run that no node of the pool supports. `code` is a script's program; default: what is
    in its work folder now. Raises 422 `spec-invalid` with one problem per wrong field, 422
    `plan-does-not-fit` with the nearest changes that would fit, and 403 for viewers.
    """
    accounts.require_role(owner, Role.SUBMITTER, "submit runs")
    result = check(spec, by=owner)
    checked, resolved = result.spec, result.resolved
    problems = [*_name_problems(name), *result.problems]
    if checked is not None and not problems:
        problems += template_problems(checked)
    if checked is not None:
        problems += priority_problems(checked.priority, by=owner)
    if not force:
        problems += result.unsupported
    if problems or checked is None or resolved is None:
        raise spec_invalid(problems)
    if result.misfits and not force:
        raise _does_not_fit(result.misfits)
    now = clock.now()
    stored, secrets = script_secrets.split(_with_hashed_key(result.stored))
    external = checked.kind == "external"
    if code is None and (workdir := workdir_of(stored)) is not None:
        code = capture(workdir, settings.DATA_ROOTS)
    with transaction.atomic():
        run = Run.objects.create(
            name=name.strip(),
            kind=checked.kind,
            state=RunState.RUNNING if external else RunState.QUEUED,
            spec=stored,
            prediction=result.prediction.document if result.prediction else None,
            plan=resolved.plan.to_dict() if resolved.plan else None,
            model_name=model_label(checked),
            devices=resolved.devices,
            sizes=result.sizes or None,
            pool_name=checked.resources.pool or "default",
            owner=owner,
            experiment=_experiment(experiment, owner),
            priority=checked.priority,
            notes=checked.notes,
            created=now,
            queued_at=now,
            started=now if external else None,
            last_seen=now if external else None,
            last_progress=now if external else None,
            attempt_number=1 if external else 0,
            summary=_first_summary(checked, resolved),
            forked_from=forked_from,
        )
        parameters.store(run)
        script_secrets.store(run, secrets)
        record.store(run, code)
        data_sets.uses_store(run)
        RunTag.objects.bulk_create(RunTag(run=run, name=tag) for tag in dict.fromkeys(checked.tags))
        if result.candidates.plans and checked.autotune is not None:
            settings_ = checked.autotune.to_dict()
            PlanTrials.objects.create(
                run=run, settings=settings_, candidates=result.candidates.plans
            )
        if external:
            Attempt.objects.create(
                run=run,
                number=1,
                state=AttemptState.RUNNING,
                created=now,
                launched=now,
                started=now,
            )
        states.run_created(
            run, by=owner.username, extra=_first_events(result, forked_from, resume_from)
        )
        if resume_from is not None:
            Checkpoint.objects.create(
                run=run,
                attempt=0,
                step=resume_from.step,
                tokens=resume_from.tokens,
                bytes=resume_from.bytes,
                path=f"{run_folder(run)}/checkpoints/{PurePosixPath(resume_from.path).name}",
                copy=resume_from.copy,
                created=now,
            )
        data = {"name": run.name, "kind": run.kind} | ({"force": True} if force else {})
        accounts.audit(actor=owner, action="run.submit", target=f"run:{run.pk}", data=data)
        if not external:
            wake_scheduler()
    return run


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


def spec_problem_list(spec: Any, *, by: User | None = None) -> list[dict[str, str]]:
    """`[{field, message, hint}]` for a spec in a form; empty if it can be submitted."""
    result = check(spec, by=by)
    return [
        {"field": item.field, "message": item.message, "hint": item.hint}
        for item in (*result.problems, *result.unsupported)
    ]


def spec_preview(spec: Any, *, by: User | None = None) -> dict[str, Any]:
    """The preview of a spec in a form; writes nothing.

    `{problems, model, teacher, plan, automatic, how, prediction, fits, misfits, advice, trials}`:
    `model`
    and `teacher` are shapes, `plan` is resolved, `how` explains it; `force` overrides `misfits`;
    `advice` lists single changes that would fit; `produce` is the estimate of a produce run;
    `sizes` are those of an elastic run; `trials` {plans, seconds, budget_s} of a run with autotune.
    Unknown parts are None.
    """
    result = check(spec, by=by)
    body = result.spec.produce if result.spec is not None and not result.problems else None
    plan = result.resolved.plan if result.resolved is not None else None
    shape = result.spec.shape if result.spec is not None else None
    teacher = teacher_shape(result.spec) if result.spec is not None else None
    return {
        "problems": [
            item.model_dump(by_alias=True) for item in (*result.problems, *result.unsupported)
        ],
        "model": shape.to_dict() if shape is not None else None,
        "teacher": teacher.to_dict() if teacher is not None else None,
        "plan": plan.to_dict() if plan is not None else None,
        "automatic": result.resolved.automatic if result.resolved is not None else None,
        "how": result.resolved.how if result.resolved is not None else None,
        "prediction": result.prediction.document if result.prediction is not None else None,
        "fits": result.prediction.fits if result.prediction is not None else None,
        "trials": {
            "plans": len(result.candidates.plans),
            "seconds": result.candidates.seconds,
            "budget_s": result.candidates.budget_s,
        }
        if result.candidates.plans
        else None,
        "produce": asdict(
            estimate_produce(body, produce_servers.visible_server(body.server.run, by))
        )
        if body is not None
        else None,
        "misfits": [item.model_dump(by_alias=True) for item in result.misfits],
        "advice": [change.message for change in result.prediction.advice]
        if result.prediction is not None
        else [],
        "sizes": result.sizes,
    }


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


def _with_hashed_key(stored: dict[str, Any]) -> dict[str, Any]:
    """The spec with the API key replaced by its hash, for the database, API, clones and nodes."""
    serve = stored.get("serve")
    if not isinstance(serve, dict) or not serve.get("api_key"):
        return stored
    return {**stored, "serve": {**serve, "api_key": hash_key(serve["api_key"])}}


def _does_not_fit(misfits: list[Problem]) -> Refusal:
    return Refusal(
        "plan-does-not-fit",
        "The plan is predicted not to fit its devices",
        422,
        f"{as_sentences(misfits)} Submit it with force to run it anyway.",
        misfits,
    )


def spec_invalid(problems: list[Problem]) -> Refusal:
    """The 422 for a spec with problems."""
    detail = as_sentences(problems)
    return Refusal("spec-invalid", "The run cannot be submitted as it is", 422, detail, problems)


def _first_summary(spec: RunSpec, resolved: ResolvedPlan) -> dict[str, Any]:
    if spec.benchmark is not None and resolved.plan is not None:
        return {"step": 0, "steps": total_steps(spec.model_copy(update={"plan": resolved.plan}))}
    return {"step": 0, "steps": spec.train.steps} if spec.train else {}


def _name_problems(name: Any) -> list[Problem]:
    if (
        not isinstance(name, str)
        or not 1 <= len(name.strip()) <= NAME_LENGTH
        or not name.strip().isprintable()
    ):
        message = f"a run's name has 1 to {NAME_LENGTH} printable characters"
        return [Problem(field="name", message=message, hint="Use a short name.")]
    return []


def _experiment(value: Experiment | str | None, owner: User) -> Experiment | None:
    if value is None or isinstance(value, Experiment):
        return value
    name = str(value).strip()
    if not 1 <= len(name) <= 120:
        message = "an experiment's name has 1 to 120 characters"
        raise spec_invalid(
            [
                Problem(
                    field="experiment", message=message, hint="Enter the question in a few words."
                )
            ]
        )
    experiment, _ = Experiment.objects.get_or_create(
        name=name, defaults={"owner": owner, "created": clock.now()}
    )
    visible = people.visible_owners(owner)
    if visible is not None and experiment.owner_id not in visible:
        message = f"the name {name!r} is used by users outside your teams"
        raise spec_invalid([Problem(field="experiment", message=message, hint="Use another name.")])
    return experiment


def _first_events(
    checked: CheckedSpec, forked_from: Run | None, resume_from: Checkpoint | None
) -> list[events.NewEvent]:
    resolved, new = checked.resolved, list[events.NewEvent]()
    assert resolved is not None
    if resolved.plan is not None:
        data = {
            "plan": resolved.plan.to_dict(),
            "devices": resolved.devices,
            "automatic": resolved.automatic,
            "why": resolved.how,
        }
        if checked.misfits:
            data |= {"forced": True, "misfits": [str(item) for item in checked.misfits]}
        new.append(events.NewEvent("plan_resolved", data))
    if forked_from is not None:
        step = resume_from.step if resume_from else None
        new.append(events.NewEvent("forked", {"from": str(forked_from.pk), "step": step}))
    return new
