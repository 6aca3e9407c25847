"""Starts, reads, pauses, continues and stops the trials of a sweep, through services of runs."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from orchestrator.accounts.models import User
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.runs.states import ACTIVE, ENDED
from orchestrator.runs.store.resumable import resumable
from orchestrator.sweeps.definition import Metric, SweepDefinition, with_parameters
from orchestrator.sweeps.models import Sweep, SweepState, Trial, TrialState
from orchestrator.sweeps.space import Point
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.wire.node_messages import RunState

OPEN = (TrialState.RUNNING, TrialState.PAUSED)
LATE_POINTS = timedelta(seconds=15)  # the last points may arrive after the run's end
_MESSAGE = 500


class FilesDeleted(Exception):
    """Files that the spec names were deleted a moment ago: a later submission may pass."""


def open_trials(sweep: Sweep) -> QuerySet[Trial]:
    """Trials that have not ended, with their runs."""
    return sweep.trials.filter(state__in=OPEN).select_related("run__owner").order_by("number")


def trial_start(
    sweep: Sweep,
    definition: SweepDefinition,
    point: Point,
    *,
    number: int,
    member: int = 0,
    parent: Trial | None = None,
) -> Trial | None:
    """Submit the run of a point; with `parent`, a fork of its newest checkpoint.

    Trial and run commit together. A refused spec gives a trial with the state `refused`. None if
    the sweep has ended meanwhile. Raises FilesDeleted if the next pass should try again.
    """
    row = {"sweep": sweep, "number": number, "member": member, "parameters": point}
    created, refusal = clock.now(), ""
    results = list(parent.results) if parent is not None else []
    try:
        with transaction.atomic():
            if not _still_running(sweep):
                return None
            run = _submit(sweep, definition, point, number, parent)
            return Trial.objects.create(
                **row,
                run=run,
                parent=parent,
                results=results,
                rung=len(results),
                created=created,
            )
    except Refusal as error:
        if error.type == "files-deleted":
            raise FilesDeleted(error.detail) from error
        refusal = "; ".join(f"{e['field']}: {e['message']}" for e in error.errors) or error.detail
    return Trial.objects.create(
        **row,
        state=TrialState.REFUSED,
        message=refusal[:_MESSAGE],
        created=created,
        ended=created,
    )


def _still_running(sweep: Sweep) -> bool:
    """Locks the sweep's row against a cancellation until the commit."""
    running = Sweep.objects.filter(pk=sweep.pk, state=SweepState.RUNNING)
    return conditional.update(running, message=sweep.message)


def _submit(
    sweep: Sweep, definition: SweepDefinition, point: Point, number: int, parent: Trial | None
) -> Run:
    name = f"{sweep.name[:140]} · {number}"
    values = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in point.items())
    marks = {
        "tags": [*definition.spec.get("tags", ()), f"sweep-{sweep.pk}"],
        "notes": f"Trial {number} of sweep {sweep.pk}, {sweep.name}: {values}",
    }
    if parent is not None:
        assert parent.run is not None
        checkpoint = resumable(run=parent.run).first()
        if checkpoint is None:
            raise Refusal("no-checkpoint", "No checkpoint", 409, "the parent has no checkpoint")
        return runs.run_fork(
            run=parent.run,
            by=sweep.owner,
            step=checkpoint.step,
            changes={**with_parameters({}, point), **marks},
            name=name,
            force=definition.force,
        )
    return runs.run_submit(
        owner=sweep.owner,
        name=name,
        spec={**with_parameters(definition.spec, point), **marks},
        experiment=sweep.experiment,
        force=definition.force,
    )


def trial_observe(trial: Trial, definition: SweepDefinition) -> bool:
    """Store what the run has reached; whether it has passed a boundary and has not ended."""
    run, reached = trial.run, False
    if run is None:
        trial_end(trial, TrialState.FAILED, "Its run was deleted.")
        return False
    step, boundaries = int(run.summary.get("step") or 0), definition.boundaries
    ended = run.state in ENDED
    while trial.rung < len(boundaries) and step >= boundaries[trial.rung]:
        value, _ = measured(run, definition.metric, to=boundaries[trial.rung])
        finite = value if value is not None and math.isfinite(value) else None
        trial.results = [*trial.results, finite]
        trial.value, trial.step = finite, boundaries[trial.rung]
        trial.rung += 1
        reached = True
    if reached:
        trial.save(update_fields=["results", "rung", "value", "step"])
    if ended:
        _observe_end(trial, run, definition)
    return reached and not ended


def trial_read(trial: Trial, definition: SweepDefinition) -> None:
    """Take the newest finite value of a run that is about to be stopped; not stored yet."""
    if trial.run is not None:
        value, step = measured(trial.run, definition.metric)
        if value is not None and math.isfinite(value):
            trial.value, trial.step = value, step


def _observe_end(trial: Trial, run: Run, definition: SweepDefinition) -> None:
    late = run.ended is not None and clock.now() - run.ended < LATE_POINTS
    value, step = measured(run, definition.metric)
    if run.state == RunState.FINISHED and late and step < definition.steps:
        return
    finite = value is not None and math.isfinite(value)
    trial.value, trial.step = (value, step) if finite else (None, step)
    name = definition.metric.name
    if run.state == RunState.FAILED:
        reason = (run.exit or {}).get("reason", "")
        trial_end(trial, TrialState.FAILED, f"The run failed: {reason}")
    elif run.state == RunState.CANCELLED:
        trial_end(trial, TrialState.STOPPED, trial.message or "Its run was cancelled.")
    elif value is None:
        names = ", ".join(entry.name for entry in telemetry.series_index(run=run)[:12])
        logged = f"it logged {names}" if names else "it logged nothing"
        trial_end(trial, TrialState.FAILED, f"The metric {name} never appeared; {logged}.")
    elif not finite:
        trial_end(trial, TrialState.FAILED, f"{name} is {value} at step {step}, not a number.")
    else:
        trial_end(trial, TrialState.FINISHED, "")


def measured(run: Run, metric: Metric, *, to: int | None = None) -> tuple[float | None, int]:
    """The objective up to a step, and the step of its newest point; None without points."""
    value, step = None, 0
    for row in telemetry.series_raw(run=run, name=metric.name, to=to):
        step, new = row[3], row[6]
        if metric.use == "last" or value is None or not math.isfinite(value):
            value = new
        elif math.isfinite(new):
            value = min(value, new) if metric.goal == "minimize" else max(value, new)
    return value, step


def trial_pause(trial: Trial, *, by: User) -> None:
    """Save a checkpoint and release the devices; without effect on a run that has just ended."""
    _set(trial, state=TrialState.PAUSED)
    if trial.run is not None and trial.run.state in (RunState.STARTING, RunState.RUNNING):
        _try(runs.run_pause, trial.run, by)


def trial_resume(trial: Trial, *, by: User) -> bool:
    """Continue the run; False while it is still saving its checkpoint."""
    run = trial.run
    if run is None or run.state == RunState.STOPPING:
        return False
    if run.state == RunState.PAUSED:
        _try(runs.run_resume, run, by)
    _set(trial, state=TrialState.RUNNING)
    return True


def trial_stop(trial: Trial, *, by: User, message: str) -> None:
    """Cancel the run and end the trial as stopped; its newest value stays."""
    if trial.run is not None and trial.run.state not in ENDED:
        _try(runs.run_cancel, trial.run, by)
    trial_end(trial, TrialState.STOPPED, message)


def trial_end(trial: Trial, state: TrialState, message: str) -> None:
    """Store the end of a trial."""
    _set(
        trial,
        state=state,
        message=message[:_MESSAGE],
        value=trial.value,
        step=trial.step,
        ended=clock.now(),
    )


def holds_devices(trial: Trial) -> bool:
    """Whether the run waits for devices or has some."""
    run = trial.run
    return run is not None and (run.state in ACTIVE or run.state == RunState.QUEUED)


def _set(trial: Trial, **values: Any) -> None:
    for name, value in values.items():
        setattr(trial, name, value)
    trial.save(update_fields=list(values))


def _try(service: Any, run: Run, by: User) -> None:
    """A refusal means that the run has moved meanwhile: the next pass sees its new state."""
    try:
        service(run=run, by=by)
    except Refusal:
        run.refresh_from_db()
