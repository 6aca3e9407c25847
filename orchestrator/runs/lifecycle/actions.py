"""What people do to runs: cancel, pause, resume, retry, checkpoint, clone, edit. Each leaves an
audit entry.

Wishes for a running attempt are written down on it; the scheduler takes them to the nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from django.db import transaction
from django.db.models import F

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock, conditional, live
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid
from orchestrator.common.redis import wake_scheduler
from orchestrator.runs import live_frames, states
from orchestrator.runs.models import Attempt, Run, RunTag
from orchestrator.runs.submission.submit import NAME_LENGTH, run_submit
from workers.contracts.wire.node_messages import AttemptState, ExitClass, RunState

_TRIES = 5  # a lost race shows the new state at once; more than a few in a row do not happen


def run_cancel(*, run: Run, by: User) -> Run:
    """Ends a waiting run at once, asks a running one to stop.

    Cancelling twice is the same as once.
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
        return _ask(run, "cancel", by)

    return acted(run, by, "cancel", act)


def run_pause(*, run: Run, by: User) -> Run:
    """Keeps a waiting run back; a running one saves a checkpoint, leaves its devices and is then
    paused.
    """

    def act() -> bool:
        state = RunState(run.state)
        if state == RunState.PAUSED or (state == RunState.STOPPING and run.requested == "pause"):
            return True
        if state in states.ENDED or state == RunState.STOPPING:
            raise _ended(run, "pause")
        _ours(run, "paused")
        if state == RunState.QUEUED:
            return states.run_move(
                run, RunState.PAUSED, by=by.username, why="paused", requested="", wait_reason=""
            )
        return _ask(run, "pause", by)

    return acted(run, by, "pause", act)


def run_resume(*, run: Run, by: User) -> Run:
    """Queues a paused run again; it goes on from its newest checkpoint."""

    def act() -> bool:
        if run.state != RunState.PAUSED:
            raise conflict(
                f"Run {run.pk} is {run.state}; only a paused run is resumed.", type="not-paused"
            )
        return requeue(run, by, "resumed")

    return acted(run, by, "resume", act)


def run_retry(*, run: Run, by: User) -> Run:
    """Queues a failed or cancelled run once more, with fresh budgets; it goes on from its newest
    checkpoint.
    """

    def act() -> bool:
        _ours(run, "retried")
        if run.state == RunState.FINISHED:
            detail = f"Run {run.pk} finished; there is nothing to retry. Clone it to run it again."
            raise conflict(detail, type="run-finished")
        if run.state not in states.ENDED:
            raise conflict(
                f"Run {run.pk} is {run.state}; only an ended run is retried.", type="run-not-ended"
            )
        return requeue(run, by, "retried", budgets_used={}, ended=None, exit=None)

    return acted(run, by, "retry", act)


def run_checkpoint(*, run: Run, by: User) -> Run:
    """Asks a running training to save a checkpoint now; an event tells when it is saved."""
    return _wish(run, by, "checkpoint", does="saves checkpoints", audited="run.checkpoint")


def run_profile(*, run: Run, by: User) -> Run:
    """Asks for torch's profile of a training's next step: an artifact of each pipeline place, and
    an event, tell.
    """
    return _wish(run, by, "profile", does="can be profiled", audited="run.profile")


def run_memory_snapshot(*, run: Run, by: User) -> Run:
    """Asks what holds memory in a training's next step: an artifact of each pipeline place, and an
    event, tell.
    """
    return _wish(run, by, "memory", does="tells its memory", audited="run.memory-snapshot")


def run_clone(
    *, run: Run, by: User, changes: dict[str, Any] | None = None, name: str | None = None
) -> Run:
    """A new run of `by` with the same spec but for `changes`; a null removes what stands there."""
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
    """Edits what may change while a run lives.

    With `version`, raises 412 if somebody edited it since.
    """
    _may_manage(run, by)
    values: dict[str, Any] = {}
    if priority is not None:
        if not -1_000_000 <= priority <= 1_000_000:
            raise invalid(
                "priority", f"{priority} is out of range", "a number from -1000000 to 1000000"
            )
        values["priority"] = priority
    if notes is not None:
        if len(notes) > 20_000:
            raise invalid(
                "notes", f"{len(notes)} characters are more than 20000", "an artifact, or a link"
            )
        values["notes"] = notes
    wanted = None if tags is None else list(dict.fromkeys(tags))
    for tag in wanted or []:
        if not isinstance(tag, str) or not 1 <= len(tag) <= 100:
            raise invalid("tags", f"{tag!r} is not a tag", "1 to 100 characters each")
    with transaction.atomic():
        row = (
            Run.objects.filter(pk=run.pk)
            if version is None
            else Run.objects.filter(pk=run.pk, version=version)
        )
        if not conditional.move(row, version=F("version") + 1, **values):
            raise Refusal(
                "version-conflict",
                "Somebody else changed the run",
                412,
                f"Run {run.pk} was changed since version {version} was read. Read it again and "
                "repeat the change.",
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
    """Ends a run that Orrery did not start: told by its own program, or by the control plane after
    long silence.
    """
    if by is not None:
        _may_manage(run, by)
    if status not in states.ENDED:
        raise invalid(
            "status", f"{status!r} is not how a run ends", "finished, failed or cancelled"
        )
    if run.kind != "external":
        raise conflict(
            f"Run {run.pk} was started by Orrery, which sees itself how it ends.",
            type="not-external",
        )
    actor = by.username if by else "control plane"
    for _ in range(_TRIES):
        if run.state == status:
            return run
        if run.state in states.ENDED:
            raise conflict(f"Run {run.pk} is {run.state} already.", type="run-ended")
        with transaction.atomic():
            if _finish_external(run, RunState(status), reason, actor):
                accounts.audit(
                    actor=by, action="run.finish", target=f"run:{run.pk}", data={"status": status}
                )
                return run
        run.refresh_from_db()
    raise _busy(run)


def forced(run: Run) -> bool:
    """Whether it was submitted although its plan was predicted not to fit; so are runs made from
    it.
    """
    return run.prediction is not None and not run.prediction.get("fits", True)


def merged(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` laid over `given` at every depth, as JSON merge patch (RFC 7396) does it."""
    made = copy.deepcopy(given)
    for name, value in changes.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, dict) and isinstance(made.get(name), dict):
            made[name] = merged(made[name], value)
        else:
            made[name] = copy.deepcopy(value)
    return made


def may_manage(run: Run, user: User) -> bool:
    """Owners who may submit, and operators."""
    return at_least(user.role, Role.OPERATOR) or (
        run.owner_id == user.pk and at_least(user.role, Role.SUBMITTER)
    )


def _wish(run: Run, by: User, what: str, *, does: str, audited: str) -> Run:
    """Something that training does at its next step, and goes on."""
    _may_manage(run, by)
    if run.kind != "train" or run.state != RunState.RUNNING:
        detail = f"Run {run.pk} is a {run.kind} run and {run.state}; a running training {does}."
        raise conflict(detail, type=f"no-{what}-now")
    with transaction.atomic():
        asked = Attempt.objects.filter(run=run, number=run.attempt_number, requested="").exclude(
            state=AttemptState.EXITED
        )
        if not conditional.move(asked, requested=what):
            before = Attempt.objects.filter(run=run, number=run.attempt_number)
            pending = before.values_list("requested", flat=True).first()
            message = (
                f"it was asked for a {pending} that its nodes have not taken up yet"
                if pending
                else "it is stopping"
            )
            raise conflict(
                f"Run {run.pk} does one thing at a time and {message}. Ask again in a second.",
                retry=True,
            )
        accounts.audit(actor=by, action=audited, target=f"run:{run.pk}")
        wake_scheduler()
    return run


def _may_manage(run: Run, by: User) -> None:
    if not may_manage(run, by):
        raise forbidden(
            f"Run {run.pk} belongs to {run.owner.username}; its owner and operators manage it."
        )


def acted(run: Run, by: User, what: str, act: Callable[[], bool]) -> Run:
    """Does it, looking again each time somebody else moved the run in between."""
    _may_manage(run, by)
    for _ in range(_TRIES):
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


def _ask(run: Run, what: str, by: User) -> bool:
    """Writes the wish on run and attempt; the run is `stopping` until the nodes tell of the exit."""
    if run.state == RunState.STOPPING:  # asked to pause, now to cancel
        won = conditional.move(
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
    """Queues it again, fresh; False when somebody was faster."""
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


def _ours(run: Run, done: str) -> None:
    if run.kind == "external":
        raise conflict(
            f"Run {run.pk} runs outside Orrery and cannot be {done} from here.", type="run-external"
        )


def _ended(run: Run, what: str) -> Refusal:
    return conflict(f"Run {run.pk} is {run.state}; there is nothing to {what}.", type="run-ended")


def _busy(run: Run) -> Refusal:
    return conflict(
        f"Run {run.pk} is changing state just now. Ask again in a second.",
        type="run-busy",
        retry=True,
    )


def shortened(name: str) -> str:
    """To the length that a run's name may have."""
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
