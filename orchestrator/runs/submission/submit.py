"""Queues the run of a submitted spec, or reports every problem and writes nothing."""

from __future__ import annotations

from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from django.conf import settings
from django.db import transaction

from orchestrator.accounts import selectors as people
from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, invalid
from orchestrator.common.redis import wake_scheduler
from orchestrator.runs import events, parameters, states
from orchestrator.runs.code import record
from orchestrator.runs.code.capture import Captured, capture, workdir_of
from orchestrator.runs.datasets import resolve as data_sets
from orchestrator.runs.models import Attempt, Checkpoint, Experiment, PlanTrials, Run, RunTag
from orchestrator.runs.store import readers
from orchestrator.runs.store.resumable import resumable
from orchestrator.runs.submission import script_secrets
from orchestrator.runs.submission.check import CheckedSpec, check
from orchestrator.runs.submission.examples.template_problems import template_problems
from orchestrator.runs.submission.resolve import ResolvedPlan, model_label
from workers.contracts import (
    Problem,
    RunSpec,
)
from workers.contracts.base import as_sentences
from workers.contracts.specs.api_key_hash import hash_key
from workers.contracts.specs.benchmarks.variants import total_steps
from workers.contracts.wire.node_messages import AttemptState, RunState

NAME_LENGTH = 160
SUBMITTER_PRIORITY = 100  # either way; operators have the range of the spec


def run_folder(run: Run) -> str:
    """The run's folder on its nodes, relative to each node's home."""
    return f"runs/{run.pk}"


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
    since = clock.now()
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
        _keep_files(stored, resume_from, since=since)
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


def _keep_files(stored: dict[str, Any], resume_from: Checkpoint | None, *, since: datetime) -> None:
    """Keep garbage collection from files of other runs until this one is stored.

    Raises 409 or 422 if it deleted one of them meanwhile.
    """
    named = readers.named_in(stored)
    readers.lock({*named, *([resume_from.run_id] if resume_from is not None else [])})
    readers.require_retained(named, since=since)
    if resume_from is None:
        return
    if not resumable(run=resume_from.run).filter(pk=resume_from.pk).exists():
        message = f"the checkpoint of step {resume_from.step} was deleted meanwhile"
        raise invalid("step", message, "Choose another checkpoint of the run.")


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
