"""User actions on runs: cancel, pause, resume, retry, checkpoint, clone, edit. Each is audited.

Requests for a running attempt are stored on it; the scheduler sends them to the nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from django.db import transaction
from django.db.models import F

from orchestrator.accounts import services as accounts
from orchestrator.accounts import teams
from orchestrator.accounts.models import User
from orchestrator.common import clock, conditional, live
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid
from orchestrator.common.redis import wake_scheduler
from orchestrator.runs import live_frames, states
from orchestrator.runs.code import record
from orchestrator.runs.datasets import resolve as data_sets
from orchestrator.runs.models import Attempt, Run, RunTag
from orchestrator.runs.submission.submit import NAME_LENGTH, priority_problems, run_submit
from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire.node_messages import AttemptState, RunState

_MAX_RACES = 5  # after a lost race the new state is visible; several in a row are rare


def run_cancel(*, run: Run, by: User) -> Run:
    """End a waiting run at once; request a running one to stop. Idempotent.

    Raises 403, 409 for a run that has ended.
    """

    def act() -> bool:
        state = RunState(run.state)
        if state == RunState.CANCELLED or (
            state == RunState.STOPPING and run.requested == "cancel"
        ):
            return True
        if state in states.ENDED:
            raise _ended(run, "cancel")
        if run.kind == "external":
            return _finish_external(
                run, RunState.CANCELLED, f"Cancelled by {by.username}.", by.username
            )
        if state in (RunState.QUEUED, RunState.PAUSED):
            reason = f"Cancelled by {by.username} while it was {state}."
            ending = {"class": str(ExitClass.CANCELLED), "reason": reason}
            return states.run_move(
                run,
                RunState.CANCELLED,
                by=by.username,
                why="cancelled",
                ended=clock.now(),
                exit=ending,
                requested="",
                wait_reason="",
            )
        return _request_stop(run, "cancel", by)

    return perform(run, by, "cancel", act)


def run_pause(*, run: Run, by: User) -> Run:
    """Pause a waiting run at once; a running one first saves a checkpoint and frees its devices."""

    def act() -> bool:
        state = RunState(run.state)
        if state == RunState.PAUSED or (state == RunState.STOPPING and run.requested == "pause"):
            return True
        if state in states.ENDED or state == RunState.STOPPING:
            raise _ended(run, "pause")
        _require_managed(run, "paused")
        if state == RunState.QUEUED:
            return states.run_move(
                run, RunState.PAUSED, by=by.username, why="paused", requested="", wait_reason=""
            )
        return _request_stop(run, "pause", by)

    return perform(run, by, "pause", act)


def run_resume(*, run: Run, by: User) -> Run:
    """Queue a paused run; it continues from its newest checkpoint."""

    def act() -> bool:
        if run.state != RunState.PAUSED:
            raise conflict(
                f"Run {run.pk} is {run.state}; only a paused run can be resumed.",
                type="not-paused",
            )
        return requeue(run, by, "resumed")

    return perform(run, by, "resume", act)


def run_retry(*, run: Run, by: User) -> Run:
    """Queue a failed or cancelled run with new retry budgets, from its newest checkpoint."""

    def act() -> bool:
        _require_managed(run, "retried")
        if run.state == RunState.FINISHED:
            detail = f"Run {run.pk} finished; there is nothing to retry. Clone it to run it again."
            raise conflict(detail, type="run-finished")
        if run.state not in states.ENDED:
            raise conflict(
                f"Run {run.pk} is {run.state}; only an ended run can be retried.",
                type="run-not-ended",
            )
        if reason := data_sets.unusable(run):
            raise conflict(f"{reason} Clone the run with another one.", type="data-set-deleted")
        record.reserve(run)
        if reason := record.unusable(run):
            raise conflict(f"{reason} Submit the program again.", type="code-deleted")
        return requeue(run, by, "retried", budgets_used={}, ended=None, exit=None)

    return perform(run, by, "retry", act)


def run_checkpoint(*, run: Run, by: User) -> Run:
    """Request a checkpoint of a training run; an event reports it."""
    return _request(run, by, "checkpoint", does="saves checkpoints", audited="run.checkpoint")


def run_profile(*, run: Run, by: User) -> Run:
    """Request torch's profile of the next training step: one artifact per stage, and an event."""
    return _request(run, by, "profile", does="can be profiled", audited="run.profile")


def run_memory_snapshot(*, run: Run, by: User) -> Run:
    """Request a memory snapshot of the next training step: one artifact per stage, and an event."""
    return _request(run, by, "memory", does="has a memory snapshot", audited="run.memory-snapshot")


def run_clone(
    *, run: Run, by: User, changes: dict[str, Any] | None = None, name: str | None = None
) -> Run:
    """Submit a new run of `by` with the spec changed by a merge patch (null removes a field)."""
    label = name or shortened(f"{run.name} copy")
    spec = merged(run.spec, changes or {})
    return run_submit(owner=by, name=label, spec=spec, experiment=run.experiment, force=forced(run))


def run_update(
    *,
    run: Run,
    by: User,
    priority: int | None = None,
    tags: Iterable[str] | None = None,
    notes: str | None = None,
    version: int | None = None,
) -> Run:
    """Edit priority, tags or notes. With `version`, raises 412 if the run was edited since."""
    require_manage(run, by)
    values: dict[str, Any] = {}
    if priority is not None:
        for problem in priority_problems(priority, by=by):
            raise invalid(problem.field, problem.message, problem.hint)
        values["priority"] = priority
    if notes is not None:
        if len(notes) > 20_000:
            raise invalid(
                "notes",
                f"{len(notes)} characters are more than 20000",
                "Use an artifact, or a link.",
            )
        values["notes"] = notes
    wanted = None if tags is None else list(dict.fromkeys(tags))
    for tag in wanted or []:
        if not isinstance(tag, str) or not 1 <= len(tag) <= 100:
            raise invalid("tags", f"{tag!r} is not a tag", "Use 1 to 100 characters each.")
    with transaction.atomic():
        row = (
            Run.objects.filter(pk=run.pk)
            if version is None
            else Run.objects.filter(pk=run.pk, version=version)
        )
        if not conditional.update(row, version=F("version") + 1, **values):
            raise Refusal(
                "version-conflict",
                "The run was edited meanwhile",
                412,
                f"Run {run.pk} was edited since version {version}. Read it again and repeat the "
                "change.",
            )
        if wanted is not None:
            RunTag.objects.filter(run=run).exclude(name__in=wanted).delete()
            RunTag.objects.bulk_create(
                (RunTag(run=run, name=tag) for tag in wanted), ignore_conflicts=True
            )
            values["tags"] = wanted
        accounts.audit(
            actor=by, action="run.update", target=f"run:{run.pk}", data={"fields": sorted(values)}
        )
        run.refresh_from_db()
        live_frames.run_state(run)
        if priority is not None and run.state == RunState.QUEUED:
            live.append("fleet", "queue", {})
            wake_scheduler()
    return run


def external_finish(*, run: Run, status: str, reason: str = "", by: User | None = None) -> Run:
    """End an external run: reported by its program, or by the control plane after long silence.

    Raises 409 for a run that Orrery started or that has ended, 422 for another `status`.
    """
    if by is not None:
        require_manage(run, by)
    if status not in states.ENDED:
        raise invalid(
            "status", f"{status!r} is not a final state", "Use finished, failed or cancelled."
        )
    if run.kind != "external":
        raise conflict(
            f"Run {run.pk} was started by Orrery, which detects its end itself.",
            type="not-external",
        )
    actor = by.username if by else "control plane"
    for _ in range(_MAX_RACES):
        if run.state == status:
            return run
        if run.state in states.ENDED:
            raise conflict(f"Run {run.pk} is already {run.state}.", type="run-ended")
        with transaction.atomic():
            if _finish_external(run, RunState(status), reason, actor):
                accounts.audit(
                    actor=by, action="run.finish", target=f"run:{run.pk}", data={"status": status}
                )
                return run
        run.refresh_from_db()
    raise _busy(run)


def forced(run: Run) -> bool:
    """Whether it was submitted with `force`; clones and forks of it are, too."""
    return run.prediction is not None and not run.prediction.get("fits", True)


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """The document changed by a JSON merge patch (RFC 7396)."""
    result = copy.deepcopy(document)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def may_manage(run: Run, user: User) -> bool:
    """Whether the user may manage the run: its owner, operators, and those of a shared team."""
    return teams.manages(user, run.owner_id)


def _request(run: Run, by: User, what: str, *, does: str, audited: str) -> Run:
    """Request something that training does at its next step without stopping."""
    require_manage(run, by)
    if run.kind != "train" or run.state != RunState.RUNNING:
        detail = (
            f"Run {run.pk} is a {run.kind} run and {run.state}; only a running training run {does}."
        )
        raise conflict(detail, type=f"no-{what}-now")
    with transaction.atomic():
        newest = Attempt.objects.filter(run=run, number=run.attempt_number)
        free = newest.filter(requested="").exclude(state=AttemptState.EXITED)
        if not conditional.update(free, requested=what):
            pending = newest.values_list("requested", flat=True).first()
            message = f"its request {pending} is pending" if pending else "it is stopping"
            raise conflict(
                f"Run {run.pk} handles one request at a time and {message}. Try again in 1 s.",
                retry=True,
            )
        accounts.audit(actor=by, action=audited, target=f"run:{run.pk}")
        wake_scheduler()
    return run


def require_manage(run: Run, by: User) -> None:
    """Raises 403 unless the user may manage the run."""
    if not may_manage(run, by):
        raise forbidden(
            f"Run {run.pk} belongs to {run.owner.username}; its owner, operators, and operators of "
            "a shared team can manage it."
        )


def perform(run: Run, by: User, what: str, act: Callable[[], bool]) -> Run:
    """Run the action; repeat it if a concurrent transition won. Raises 403, 409."""
    require_manage(run, by)
    for _ in range(_MAX_RACES):
        with transaction.atomic():
            before = (run.state, run.requested)
            if act():
                run.refresh_from_db()
                if (run.state, run.requested) != before:
                    accounts.audit(actor=by, action=f"run.{what}", target=f"run:{run.pk}")
                    wake_scheduler()
                return run
        run.refresh_from_db()
    raise _busy(run)


def _request_stop(run: Run, what: str, by: User) -> bool:
    """Store the request on run and attempt; the run is `stopping` until its nodes report."""
    if run.state == RunState.STOPPING:  # pausing, now cancelled
        won = conditional.update(
            Run.objects.filter(pk=run.pk, state=run.state, requested=run.requested), requested=what
        )
        if won:
            run.refresh_from_db()
            live_frames.run_state(run)
    else:
        why = "cancelled" if what == "cancel" else "paused"
        won = states.run_move(run, RunState.STOPPING, by=by.username, why=why, requested=what)
    if won:
        Attempt.objects.filter(run=run, number=run.attempt_number).update(requested=what)
    return won


def requeue(run: Run, by: User, why: str, **values: Any) -> bool:
    """Queue the run again; False if a concurrent transition won."""
    return states.run_move(
        run,
        RunState.QUEUED,
        by=by.username,
        why=why,
        queued_at=clock.now(),
        not_before=None,
        requested="",
        **values,
    )


def _finish_external(run: Run, state: RunState, reason: str, by: str) -> bool:
    exit_class = {RunState.FINISHED: ExitClass.OK, RunState.CANCELLED: ExitClass.CANCELLED}.get(
        state, ExitClass.USER_ERROR
    )
    now, ending = clock.now(), {"class": str(exit_class), "reason": reason}
    if not states.run_move(run, state, by=by, why=reason, ended=now, exit=ending):
        return False
    for attempt in Attempt.objects.filter(run=run, number=run.attempt_number).select_related("run"):
        states.attempt_move(
            attempt, AttemptState.EXITED, why=reason, ended=now, exit=ending, exit_class=exit_class
        )
    return True


def _require_managed(run: Run, done: str) -> None:
    if run.kind == "external":
        raise conflict(
            f"Run {run.pk} runs outside Orrery and cannot be {done} from here.", type="run-external"
        )


def _ended(run: Run, what: str) -> Refusal:
    return conflict(f"Run {run.pk} is {run.state}; there is nothing to {what}.", type="run-ended")


def _busy(run: Run) -> Refusal:
    return conflict(
        f"Run {run.pk} is changing its state. Try again in 1 s.",
        type="run-busy",
        retry=True,
    )


def shortened(name: str) -> str:
    """The name, truncated to the maximum length of a run's name."""
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
