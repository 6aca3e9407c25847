"""Going back to a checkpoint: a fork is a new run from it, a rewind the same run once more, its
later points given up.

Nodes keep a fork's checkpoint for it under a name of its own; that order is the scheduler's to
send.
"""

from __future__ import annotations

from typing import Any

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, conflict, invalid
from orchestrator.runs import events, states
from orchestrator.runs.lifecycle.actions import acted, forced, merged, requeue, shortened
from orchestrator.runs.models import Checkpoint, Run
from orchestrator.runs.submission.submit import run_submit, spec_invalid
from workers.contracts import Problem
from workers.contracts.wire.node_messages import RunState

# what a checkpoint was written with, and the default where a spec leaves it out
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
    """A new run of `by` that goes on from this run's checkpoint of that step, with a changed spec.

    `changes` is a merge patch (RFC 7396); the plan may be another one. Raises 422 where no
    checkpoint of that step is
    kept (naming those that are), for changes that a checkpoint cannot follow, and as `run_submit`
    does.
    """
    checkpoint = _kept(run, step)
    spec = merged(run.spec, changes or {})
    problems = _problems(run, spec, step)
    if problems:
        raise spec_invalid(problems)
    made = run_submit(
        owner=by,
        name=name or shortened(f"{run.name} from {step}"),
        spec=spec,
        experiment=run.experiment,
        forked_from=run,
        resume_from=checkpoint,
        force=force or forced(run),
    )
    told = events.New(
        "forked", {"into": str(made.pk), "name": made.name, "step": step, "by": by.username}
    )
    events.record(run=run, new=[told])
    return made


def run_rewind(*, run: Run, by: User, step: int) -> Run:
    """Queues an ended or paused run once more, from its checkpoint of that step. What it did after
    that step is given
    up: points of older attempts no longer show, later checkpoints are dropped.

    Raises 409 for a run that is under way, 422 as `run_fork` for a step that is not kept.
    """

    def act() -> bool:
        if run.state not in states.ENDED and run.state != RunState.PAUSED:
            detail = f"Run {run.pk} is {run.state}; pause or cancel it first, then rewind it."
            raise conflict(detail, type="run-under-way")
        checkpoint = _kept(run, step)
        if problem := _no_steps_left(run.spec, step):
            raise spec_invalid([problem])
        rewinds = [*run.rewinds, [run.attempt_number, step]]
        summary = {**run.summary, "step": step}
        why = f"rewound to step {step}"
        if not requeue(
            run, by, why, budgets_used={}, ended=None, exit=None, rewinds=rewinds, summary=summary
        ):
            return False
        later = Checkpoint.objects.filter(run=run, deleted=None, step__gt=step)
        given_up = sorted(set(later.values_list("step", flat=True)))
        later.update(deleted=clock.now())
        data = {"step": step, "by": by.username, "tokens": checkpoint.tokens, "given_up": given_up}
        events.record(
            run=run, new=[events.New("rewound", data, attempt=run.attempt_number or None)]
        )
        return True

    return acted(run, by, "rewind", act)


def fork_problems(*, run: Run, step: int, changes: dict[str, Any]) -> list[dict[str, str]]:
    """What of `changes` this checkpoint cannot follow, `[{field, message, try}]`, for a form that is
    still edited.
    """
    found = _problems(run, merged(run.spec, changes), step)
    return [{"field": item.field, "message": item.message, "hint": item.hint} for item in found]


def _kept(run: Run, step: int) -> Checkpoint:
    kept = Checkpoint.objects.filter(run=run, deleted=None)
    found = kept.filter(step=step).order_by("-id").first()
    if found is not None:
        return found
    steps = sorted(set(kept.values_list("step", flat=True)))
    near = sorted(sorted(steps, key=lambda known: abs(known - step))[:5])
    message = f"no checkpoint of step {step} is kept" + (
        f"; kept are {', '.join(map(str, near))}" if near else ""
    )
    raise _unkept(message, str(min(near, key=lambda known: abs(known - step))) if near else "")


def _unkept(message: str, nearest: str) -> Refusal:
    return invalid("step", message, nearest or "a clone: this run keeps no checkpoint")


def _problems(run: Run, spec: dict[str, Any], step: int) -> list[Problem]:
    found = []
    for field in ("model", "kind"):
        if spec.get(field) != run.spec.get(field):
            message = (
                f"a fork goes on with the {'weights' if field == 'model' else 'kind of run'} it has"
            )
            found.append(
                Problem(field=field, message=message, hint=f"a clone with another {field}")
            )
    for path, default in _FIXED.items():
        was, wanted = _at(run.spec, path, default), _at(spec, path, default)
        if was != wanted:
            message = f"the checkpoint was written with {was}, and goes on with no other"
            found.append(Problem(field=path, message=message, hint=f"{was}, or a clone"))
    problem = _no_steps_left(spec, step)
    return [*found, problem] if problem else found


def _no_steps_left(spec: dict[str, Any], step: int) -> Problem | None:
    steps = _at(spec, "train.steps", None)
    if isinstance(steps, int) and steps <= step:
        return Problem(
            field="train.steps",
            message=f"all {steps} steps are done by step {step}",
            hint=str(2 * step),
        )
    return None


def _at(spec: dict[str, Any], path: str, default: Any) -> Any:
    found: Any = spec
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return default if found is None else found
