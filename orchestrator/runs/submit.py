"""From what a person asks to a queued run, or to sentences that say why not. Nothing is written before all is right."""

from __future__ import annotations

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
from orchestrator.runs.paths import path_problems, with_absolute_paths
from orchestrator.runs.resolve import Resolved, model_label, resolve_plan
from workers.contracts import Problem, RunSpec, problems_of, spec_problems
from workers.contracts.node import AttemptState, RunState

NAME_LENGTH = 160


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

    `experiment` is one, or a name: an unknown name makes a new one. `resume_from` is a checkpoint of `forked_from` that
    the run goes on from. `force` submits what the planner thinks does not fit.
    Raises 422 `spec-invalid` with a sentence for each wrong field, 403 for people who may only look.
    """
    accounts.require_role(owner, Role.SUBMITTER, "submit runs")
    checked, resolved, stored, problems = check(spec)
    problems = [*_name_problems(name), *problems]
    if problems or checked is None or resolved is None:
        raise spec_invalid(problems)
    now = clock.now()
    external = checked.kind == "external"
    with transaction.atomic():
        run = Run.objects.create(
            name=name.strip(),
            kind=checked.kind,
            state=RunState.RUNNING if external else RunState.QUEUED,
            spec=stored,
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
            summary={"step": 0, "steps": checked.train.steps} if checked.train else {},
            forked_from=forked_from,
        )
        RunTag.objects.bulk_create(RunTag(run=run, name=tag) for tag in dict.fromkeys(checked.tags))
        if external:
            Attempt.objects.create(
                run=run, number=1, state=AttemptState.RUNNING, created=now, launched=now, started=now
            )
        states.run_born(run, by=owner.username, extra=_first_events(resolved, forked_from, resume_from))
        if resume_from is not None:
            Checkpoint.objects.create(
                run=run, attempt=0, step=resume_from.step, tokens=resume_from.tokens, path=resume_from.path,
                bytes=resume_from.bytes, created=now,
            )  # fmt: skip
        data = {"name": run.name, "kind": run.kind} | ({"force": True} if force else {})
        accounts.audit(actor=owner, action="run.submit", target=f"run:{run.pk}", data=data)
        if not external:
            wake_scheduler()
    return run


def check(spec: Any) -> tuple[RunSpec | None, Resolved | None, dict[str, Any], list[Problem]]:
    """`(the spec, its plan resolved, the spec as it is stored, what is wrong with it)`, writing nothing.

    A spec is stored as given, defaults left out, so that a copy of it rests on the defaults of its own day.
    """
    if not isinstance(spec, dict):
        return None, None, {}, [Problem(field="spec", says="the spec is not an object", try_='{"kind": "train", ...}')]
    roots = settings.DATA_ROOTS
    try:
        checked = RunSpec.from_dict(with_absolute_paths(spec, data_roots=roots))
    except ValidationError as error:
        return None, None, {}, problems_of(error)
    resolved = resolve_plan(checked)
    stored = checked.model_dump(mode="json", exclude_unset=True)
    complete = checked.model_copy(update={"plan": resolved.plan}) if resolved.plan else checked
    problems = spec_problems(complete)
    if checked.kind != "external":
        problems += path_problems(checked, data_roots=roots, run_root=settings.ENV.media_runs)
    return checked, resolved, stored, problems


def spec_problem_list(spec: Any) -> list[dict[str, str]]:
    """`[{field, says, try}]` for a spec that a form still edits; empty when it may be submitted."""
    return [{"field": item.field, "says": item.says, "try": item.try_} for item in check(spec)[3]]


def spec_invalid(problems: list[Problem]) -> Refusal:
    first = "; ".join(str(item) for item in problems[:3])
    return Refusal("spec-invalid", "The run cannot be submitted as it is", 422, first, problems)


def _name_problems(name: Any) -> list[Problem]:
    if not isinstance(name, str) or not 1 <= len(name.strip()) <= NAME_LENGTH or not name.strip().isprintable():
        says = f"a run's name has 1 to {NAME_LENGTH} printable characters"
        return [Problem(field="name", says=says, try_="first try")]
    return []


def _experiment(given: Experiment | str | None, owner: User) -> Experiment | None:
    if given is None or isinstance(given, Experiment):
        return given
    name = str(given).strip()
    if not 1 <= len(name) <= 120:
        says = "an experiment's name has 1 to 120 characters"
        raise spec_invalid([Problem(field="experiment", says=says, try_="its question in a few words")])
    found, _ = Experiment.objects.get_or_create(name=name, defaults={"owner": owner, "created": clock.now()})
    visible = people.visible_owners(owner)
    if visible is not None and found.owner_id not in visible:
        says = f"the name {name!r} is taken by people you share no team with"
        raise spec_invalid([Problem(field="experiment", says=says, try_="another name")])
    return found


def _first_events(resolved: Resolved, forked_from: Run | None, resume_from: Checkpoint | None) -> list[events.New]:
    found = []
    if resolved.plan is not None:
        data = {
            "plan": resolved.plan.to_dict(),
            "devices": resolved.devices,
            "automatic": resolved.automatic,
            "why": resolved.how,
        }
        found.append(events.New("plan_resolved", data))
    if forked_from is not None:
        step = resume_from.step if resume_from else None
        found.append(events.New("forked", {"from": str(forked_from.pk), "step": step}))
    return found
