"""From what a person asks to a queued run, or to sentences that say why not.

Nothing is written before all is right.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from django.conf import settings
from django.db import transaction
from pydantic import ValidationError

from orchestrator.accounts import selectors as people
from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.common.redis import wake_scheduler
from orchestrator.runs import events, states
from orchestrator.runs.models import Attempt, Checkpoint, Experiment, Run, RunTag
from orchestrator.runs.submission.data_paths import path_problems, with_absolute_paths
from orchestrator.runs.submission.predict_serving import predict_serving
from orchestrator.runs.submission.predict_training import Prediction, choose, predict
from orchestrator.runs.submission.resolve import Resolved, model_label, resolve_plan
from orchestrator.runs.submission.target_hardware import TargetHardware, target_hardware_for
from orchestrator.runs.submission.weights import models_root
from workers.contracts import Problem, RunSpec, validation_problems, spec_problems
from workers.contracts.specs.api_key_hash import hidden
from workers.contracts.specs.benchmark import as_training, technique_problems
from workers.contracts.specs.benchmark_variants import total_steps
from workers.contracts.specs.inference_support import INFERENCE_KINDS, inference_problems
from workers.contracts.specs.training_support import combination_problems
from workers.contracts.wire.node_messages import AttemptState, RunState

log = logging.getLogger(__name__)

NAME_LENGTH = 160


def run_folder(run: Run) -> str:
    """Where a run's files lie on its nodes, relative to each one's home."""
    return f"runs/{run.pk}"


@dataclass(frozen=True)
class Checked:
    """A spec with its plan resolved, as it is stored, what is wrong with it, and what the planner
    says of it.

    `misfits` say that the plan is predicted not to fit the pool's devices, and what would; empty
    where it fits, where
    the pool has no device that is known, and for runs that the planner knows nothing of.
    """

    spec: RunSpec | None = None
    resolved: Resolved | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    prediction: Prediction | None = None
    misfits: list[Problem] = field(default_factory=list)


def run_submit(
    *,
    owner: User,
    name: str,
    spec: dict[str, Any],
    experiment: Experiment | str | None = None,
    force: bool = False,
    forked_from: Run | None = None,
    resume_from: Checkpoint | None = None,
) -> Run:
    """Queues the run and wakes the scheduler. An external run is born running, with attempt 1.

    `experiment` is one, or a name: an unknown name makes a new one. `resume_from` is a checkpoint
    of `forked_from` that
    the run goes on from. `force` submits what the planner thinks does not fit.
    Raises 422 `spec-invalid` with a sentence for each wrong field, 422 `plan-does-not-fit` with the
    nearest changes
    that would, 403 for people who may only look.
    """
    accounts.require_role(owner, Role.SUBMITTER, "submit runs")
    found = check(spec)
    checked, resolved = found.spec, found.resolved
    problems = [*_name_problems(name), *found.problems]
    if problems or checked is None or resolved is None:
        raise spec_invalid(problems)
    if found.misfits and not force:
        raise _does_not_fit(found.misfits)
    now = clock.now()
    external = checked.kind == "external"
    with transaction.atomic():
        run = Run.objects.create(
            name=name.strip(),
            kind=checked.kind,
            state=RunState.RUNNING if external else RunState.QUEUED,
            spec=_secret(found.stored),
            prediction=found.prediction.document if found.prediction else None,
            plan=resolved.plan.to_dict() if resolved.plan else None,
            model_name=model_label(checked),
            devices=resolved.devices,
            pool_name=checked.resources.pool or "default",
            owner=owner,
            experiment=_experiment(experiment, owner),
            priority=checked.priority,
            notes=checked.notes,
            created=now,
            queued_at=now,
            started=now if external else None,
            last_seen=now if external else None,
            attempt_number=1 if external else 0,
            summary=_first_summary(checked, resolved),
            forked_from=forked_from,
        )
        RunTag.objects.bulk_create(RunTag(run=run, name=tag) for tag in dict.fromkeys(checked.tags))
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
            run, by=owner.username, extra=_first_events(found, forked_from, resume_from)
        )
        if resume_from is not None:
            Checkpoint.objects.create(
                run=run,
                attempt=0,
                step=resume_from.step,
                tokens=resume_from.tokens,
                bytes=resume_from.bytes,
                path=f"{run_folder(run)}/checkpoints/{PurePosixPath(resume_from.path).name}",
                created=now,
            )
        data = {"name": run.name, "kind": run.kind} | ({"force": True} if force else {})
        accounts.audit(actor=owner, action="run.submit", target=f"run:{run.pk}", data=data)
        if not external:
            wake_scheduler()
    return run


def check(spec: Any) -> Checked:
    """All that is wrong with a spec, and what it would be as a run, writing nothing.

    A spec is stored as given, defaults left out, so that a copy of it rests on the defaults of its
    own day.
    """
    if not isinstance(spec, dict):
        message = "the spec is not an object"
        return Checked(
            problems=[Problem(field="spec", message=message, hint='{"kind": "train", ...}')]
        )
    roots = settings.DATA_ROOTS
    try:
        checked = RunSpec.from_dict(
            with_absolute_paths(spec, data_roots=roots, models_root=models_root())
        )
    except ValidationError as error:
        return Checked(problems=validation_problems(error))
    training = as_training(checked)  # of a benchmark: its base
    hardware = target_hardware_for(training) if training.kind in ("train", *INFERENCE_KINDS) else None
    resolved = resolve_plan(
        training, (lambda spec, devices: choose(spec, hardware, devices)) if hardware else None
    )
    stored = checked.model_dump(mode="json", exclude_unset=True)
    complete = checked.model_copy(update={"plan": resolved.plan}) if resolved.plan else checked
    problems = [*resolved.problems, *([] if resolved.problems else spec_problems(complete))]
    problems = problems or combination_problems(complete)
    if checked.benchmark is not None:
        problems += technique_problems(checked.benchmark)
    if checked.kind in INFERENCE_KINDS:
        problems += inference_problems(complete)
    if checked.kind != "external":
        problems += path_problems(
            checked, data_roots=roots, run_root=settings.ENV.media_runs, models_root=models_root()
        )
    prediction = (
        _predicted(as_training(complete), resolved, hardware)
        if hardware is not None and not problems
        else None
    )
    misfits = prediction.problems(hardware) if prediction is not None and hardware is not None else []
    return Checked(checked, resolved, stored, problems, prediction, misfits)


def spec_problem_list(spec: Any) -> list[dict[str, str]]:
    """`[{field, message, try}]` for a spec that a form still edits; empty when it may be submitted."""
    return [
        {"field": item.field, "message": item.message, "hint": item.hint}
        for item in check(spec).problems
    ]


def spec_preview(spec: Any) -> dict[str, Any]:
    """What a form may say beside a spec, writing nothing.

    `{problems, plan, automatic, how, prediction, fits, misfits, advice}`: `plan` is the resolved
    one, `how` where it is
    from; `misfits` are problems that only `force` overrides, `advice` says what single changes
    would make it fit. Parts
    that cannot be told are None.
    """
    found = check(spec)
    plan = found.resolved.plan if found.resolved is not None else None
    return {
        "problems": [item.model_dump(by_alias=True) for item in found.problems],
        "plan": plan.to_dict() if plan is not None else None,
        "automatic": found.resolved.automatic if found.resolved is not None else None,
        "how": found.resolved.how if found.resolved is not None else None,
        "prediction": found.prediction.document if found.prediction is not None else None,
        "fits": found.prediction.fits if found.prediction is not None else None,
        "misfits": [item.model_dump(by_alias=True) for item in found.misfits],
        "advice": [each.message for each in found.prediction.advice]
        if found.prediction is not None
        else [],
    }


def _predicted(spec: RunSpec, resolved: Resolved, hardware: TargetHardware) -> Prediction | None:
    """None also where the planner fails: a run must not wait for a forecast."""
    if resolved.plan is None:
        return None
    try:
        return (predict_serving if spec.kind in INFERENCE_KINDS else predict)(
            spec, resolved.plan, hardware
        )
    except Exception:
        log.exception("the planner failed on a spec, which is accepted without a prediction")
        return None


def _secret(stored: dict[str, Any]) -> dict[str, Any]:
    """Without keys that could be read: rows, answers, copies of the run and its nodes get what they
    are checked by.
    """
    serve = stored.get("serve")
    if not isinstance(serve, dict) or not serve.get("api_key"):
        return stored
    return {**stored, "serve": {**serve, "api_key": hidden(serve["api_key"])}}


def _does_not_fit(misfits: list[Problem]) -> Refusal:
    detail = "; ".join(str(item) for item in misfits[:3])
    return Refusal(
        "plan-does-not-fit",
        "The plan is predicted not to fit its devices",
        422,
        f"{detail}. Send it with force to run it all the same.",
        misfits,
    )


def spec_invalid(problems: list[Problem]) -> Refusal:
    first = "; ".join(str(item) for item in problems[:3])
    return Refusal("spec-invalid", "The run cannot be submitted as it is", 422, first, problems)


def _first_summary(spec: RunSpec, resolved: Resolved) -> dict[str, Any]:
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
        return [Problem(field="name", message=message, hint="first try")]
    return []


def _experiment(given: Experiment | str | None, owner: User) -> Experiment | None:
    if given is None or isinstance(given, Experiment):
        return given
    name = str(given).strip()
    if not 1 <= len(name) <= 120:
        message = "an experiment's name has 1 to 120 characters"
        raise spec_invalid(
            [Problem(field="experiment", message=message, hint="its question in a few words")]
        )
    found, _ = Experiment.objects.get_or_create(
        name=name, defaults={"owner": owner, "created": clock.now()}
    )
    visible = people.visible_owners(owner)
    if visible is not None and found.owner_id not in visible:
        message = f"the name {name!r} is taken by people you share no team with"
        raise spec_invalid([Problem(field="experiment", message=message, hint="another name")])
    return found


def _first_events(
    checked: Checked, forked_from: Run | None, resume_from: Checkpoint | None
) -> list[events.NewEvent]:
    resolved, found = checked.resolved, list[events.NewEvent]()
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
        found.append(events.NewEvent("plan_resolved", data))
    if forked_from is not None:
        step = resume_from.step if resume_from else None
        found.append(events.NewEvent("forked", {"from": str(forked_from.pk), "step": step}))
    return found
