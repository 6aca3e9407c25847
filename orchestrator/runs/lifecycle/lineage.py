"""Forks and rewinds: a new run from a checkpoint, or the same run again from an earlier step.

Nodes hard-link the checkpoint for the fork; the scheduler sends that order.
"""

from __future__ import annotations

from typing import Any

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import conflict, invalid
from orchestrator.runs import events, states
from orchestrator.runs.lifecycle.actions import forced, merged, perform, requeue, shortened
from orchestrator.runs.models import Checkpoint, Run
from orchestrator.runs.store.resumable import resumable
from orchestrator.runs.submission.submit import run_submit, spec_invalid
from workers.contracts import Problem
from workers.contracts.wire.node_messages import RunState

# fields that a checkpoint depends on, with their defaults
_FIXED: dict[str, Any] = {"train.seq_len": None, "train.seed": 0, "train.optimizer.name": "adamw"}


def run_fork(
    *,
    run: Run,
    by: User,
    step: int,
    changes: dict[str, Any] | None = None,
    name: str | None = None,
    force: bool = False,
) -> Run:
    """Submit a run of `by` that continues from this run's checkpoint, with a changed spec.

    `changes` is a merge patch (RFC 7396) and may change the plan. Raises 422 if the step has no
    retained checkpoint (listing those that exist), for changes that are incompatible with the
    checkpoint, and as `run_submit` does.
    """
    checkpoint = _retained_checkpoint(run, step)
    spec = merged(run.spec, changes or {})
    problems = _problems(run, spec, step)
    if problems:
        raise spec_invalid(problems)
    fork = run_submit(
        owner=by,
        name=name or shortened(f"{run.name} from {step}"),
        spec=spec,
        experiment=run.experiment,
        forked_from=run,
        resume_from=checkpoint,
        force=force or forced(run),
    )
    data = {"into": str(fork.pk), "name": fork.name, "step": step, "by": by.username}
    events.record(run=run, new=[events.NewEvent("forked", data)])
    return fork


def run_rewind(*, run: Run, by: User, step: int) -> Run:
    """Queue an ended or paused run again from its checkpoint of that step.

    Discards later steps: points of older attempts are hidden, later checkpoints marked as deleted.
    Raises 409 for an active run, and 422 as `run_fork` for a step without retained checkpoint.
    """

    def act() -> bool:
        if run.state not in states.ENDED and run.state != RunState.PAUSED:
            detail = f"Run {run.pk} is {run.state}; pause or cancel it first, then rewind it."
            raise conflict(detail, type="run-under-way")
        _retained_checkpoint(run, step)
        if problem := _no_steps_left(run.spec, step):
            raise spec_invalid([problem])
        rewinds = [*run.rewinds, [run.attempt_number, step]]
        summary = {**run.summary, "step": step}
        why = f"rewound to step {step}"
        if not requeue(
            run, by, why, budgets_used={}, ended=None, exit=None, rewinds=rewinds, summary=summary
        ):
            return False
        checkpoint = _retained_checkpoint(run, step)  # garbage collection waits for this lock
        later = Checkpoint.objects.filter(run=run, deleted=None, step__gt=step)
        given_up = sorted(set(later.values_list("step", flat=True)))
        later.update(deleted=clock.now())
        Checkpoint.objects.filter(run=run, step__gt=step).update(copy=None)
        Checkpoint.objects.filter(pk=checkpoint.pk).update(deleted=None)  # nodes read its copy
        data = {"step": step, "by": by.username, "tokens": checkpoint.tokens, "given_up": given_up}
        events.record(
            run=run, new=[events.NewEvent("rewound", data, attempt=run.attempt_number or None)]
        )
        return True

    return perform(run, by, "rewind", act)


def fork_problems(*, run: Run, step: int, changes: dict[str, Any]) -> list[dict[str, str]]:
    """The changes that are incompatible with the checkpoint, `[{field, message, hint}]`."""
    problems = _problems(run, merged(run.spec, changes), step)
    return [{"field": item.field, "message": item.message, "hint": item.hint} for item in problems]


def _retained_checkpoint(run: Run, step: int) -> Checkpoint:
    retained = resumable(run=run)
    checkpoint = retained.filter(step=step).first()
    if checkpoint is not None:
        return checkpoint
    steps = set(retained.values_list("step", flat=True))
    nearest = sorted(sorted(steps), key=lambda other: abs(other - step))[:5]
    message = f"there is no retained checkpoint of step {step}"
    if not nearest:
        raise invalid("step", message, "Clone the run, because it has no retained checkpoint.")
    listed = ", ".join(str(other) for other in sorted(nearest))
    raise invalid("step", f"{message}; there are {listed}", f"Use {nearest[0]}.")


def _problems(run: Run, spec: dict[str, Any], step: int) -> list[Problem]:
    problems = []
    for field in ("model", "kind"):
        if spec.get(field) != run.spec.get(field):
            message = f"a fork cannot change the {field}"
            problems.append(
                Problem(field=field, message=message, hint=f"Clone the run with another {field}.")
            )
    for path, default in _FIXED.items():
        old, new = _at(run.spec, path, default), _at(spec, path, default)
        if old != new:
            message = f"the checkpoint was written with {old} and requires it"
            problems.append(
                Problem(field=path, message=message, hint=f"Use {old}, or clone the run.")
            )
    problem = _no_steps_left(spec, step)
    return [*problems, problem] if problem else problems


def _no_steps_left(spec: dict[str, Any], step: int) -> Problem | None:
    steps = _at(spec, "train.steps", None)
    if isinstance(steps, int) and steps <= step:
        return Problem(
            field="train.steps",
            message=f"all {steps} steps are done by step {step}",
            hint=f"Use {2 * step}.",
        )
    return None


def _at(spec: dict[str, Any], path: str, default: Any) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return default if value is None else value
