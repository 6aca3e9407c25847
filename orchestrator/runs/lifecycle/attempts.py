"""Attempt reports from the scheduler: placed, launching, running, exited.

Every function is idempotent and ignores late reports and reports about ended attempts. User
actions are in `actions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction

from orchestrator.common import clock, conditional
from orchestrator.common.redis import wake_scheduler
from orchestrator.common.units import count
from orchestrator.runs import states
from orchestrator.runs.lifecycle.retry_budgets import NODE_LOST, outcome
from orchestrator.runs.models import Attempt, AttemptShare, Run
from orchestrator.runs.oom_hint import with_memory_hint
from orchestrator.runs.submission.follow_up import evaluation_submit
from workers.contracts.exit_classes import ExitClass
from workers.contracts.specs.run import Retries
from workers.contracts.wire.node_messages import AttemptState, RunState

# how long an elastic run whose attempt ended to change its size is placed before other runs
KEEPS_PLACE_S = 60.0
ATTEMPT_REQUESTS = ("checkpoint", "profile", "memory")  # that an attempt executes without stopping

_EARLIER = {
    AttemptState.LAUNCHING: (AttemptState.ASSIGNED,),
    AttemptState.RUNNING: (AttemptState.ASSIGNED, AttemptState.LAUNCHING),
}


@dataclass(frozen=True)
class NewAttempt:
    """An attempt to create.

    `placement` is `[{node, address, devices: [index], node_rank}]`, `resume_from` `{path, step}`.
    """

    run: Run
    placement: Sequence[Mapping[str, Any]]
    resume_from: Mapping[str, Any] | None = None


def attempts_create(*, new: Sequence[NewAttempt]) -> list[Attempt]:
    """Move the queued ones of these runs to `starting`, each with a new attempt and fence.

    One transaction with a constant number of queries; omits runs that are not queued.
    """
    by_run = {item.run.pk: item for item in new}
    why = {run: f"placed on {_describe(item.placement)}" for run, item in by_run.items()}
    now = clock.now()
    with transaction.atomic():
        moved = states.runs_start([item.run for item in new], why=why)
        attempts = Attempt.objects.bulk_create(
            Attempt(
                run=run,
                number=run.attempt_number,
                placement=[dict(share) for share in by_run[run.pk].placement],
                resume_from=dict(resume) if (resume := by_run[run.pk].resume_from) else None,
                queued=run.queued_at,
                created=now,
            )
            for run in moved
        )
        AttemptShare.objects.bulk_create(
            AttemptShare(attempt=attempt, node=share["node"])
            for attempt in attempts
            for share in attempt.placement
        )
        return attempts


def attempts_enqueue(*, new: Sequence[NewAttempt]) -> list[Attempt]:
    """The next attempt of each of these runs that is queued; the runs stay queued.

    For engines with a queue of their own: the run starts with the attempt's first report. The
    shares are created by `attempt_place`, because their names contain the attempt's id.
    """
    by_run = {item.run.pk: item for item in new}
    now = clock.now()
    with transaction.atomic():
        locked = Run.objects.select_for_update(no_key=True).filter(
            pk__in=by_run, state=RunState.QUEUED
        )
        waiting = list(locked.order_by("pk"))
        for run in waiting:
            run.attempt_number += 1
            Run.objects.filter(pk=run.pk).update(attempt_number=run.attempt_number)
        return Attempt.objects.bulk_create(
            Attempt(
                run=run,
                number=run.attempt_number,
                resume_from=dict(resume) if (resume := by_run[run.pk].resume_from) else None,
                queued=run.queued_at,
                created=now,
            )
            for run in waiting
        )


def attempt_place(*, attempt: Attempt, placement: Sequence[Mapping[str, Any]]) -> None:
    """Store where an enqueued attempt will run, or where the engine has started it."""
    attempt.placement = [dict(share) for share in placement]
    with transaction.atomic():
        Attempt.objects.filter(pk=attempt.pk).update(placement=attempt.placement)
        AttemptShare.objects.bulk_create(
            (AttemptShare(attempt=attempt, node=share["node"]) for share in placement),
            ignore_conflicts=True,
        )


def attempt_create(
    *,
    run: Run,
    placement: Sequence[Mapping[str, Any]],
    resume_from: Mapping[str, Any] | None = None,
) -> Attempt | None:
    """`attempts_create` for one run, which is refreshed; None if it is not queued."""
    created = attempts_create(new=[NewAttempt(run, placement, resume_from)])
    run.refresh_from_db()
    return created[0] if created else None


def _describe(placement: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{share['node']} ({count(len(share['devices']), 'device')})" for share in placement
    )


def attempts_dispatched(*, attempts: Sequence[Attempt]) -> None:
    """Record that the launch orders of these attempts were sent; keeps earlier times."""
    now = clock.now()
    fresh = [attempt for attempt in attempts if attempt.dispatched is None]
    if fresh:
        Attempt.objects.filter(pk__in=[attempt.pk for attempt in fresh], dispatched=None).update(
            dispatched=now
        )


def share_advance(
    *, attempt_id: int, node: str, state: str, known: str = AttemptState.ASSIGNED
) -> bool:
    """Record that a node's part of an attempt launches or runs; False if it is there already.

    `known` is its state as the caller read it, which saves the UPDATE of a state that is not new.
    """
    earlier = _EARLIER.get(AttemptState(state), ())
    if known not in earlier:
        return False
    share = AttemptShare.objects.filter(attempt_id=attempt_id, node=node, state__in=earlier)
    return conditional.update(share, state=state)


def attempt_progress(*, attempt: Attempt) -> None:
    """Mark the attempt as launching at its first report, as running if all its nodes run."""
    if attempt.state == AttemptState.EXITED:
        return
    if attempt.state == AttemptState.ASSIGNED:
        attempt_launching(attempt=attempt)
    if attempt.state == AttemptState.RUNNING:
        return
    states_of_nodes = list(attempt.shares.values_list("state", flat=True))
    if states_of_nodes and all(state == AttemptState.RUNNING for state in states_of_nodes):
        attempt_running(attempt=attempt)


def attempt_launching(*, attempt: Attempt) -> bool:
    """Record that the first supervisor runs; a run that waited in an engine's queue starts."""
    with transaction.atomic():
        if not states.attempt_move(attempt, AttemptState.LAUNCHING, launched=clock.now()):
            return False
        _leave_queue(attempt, Run.objects.get(pk=attempt.run_id), "its job started")
    return True


def _leave_queue(attempt: Attempt, run: Run, why: str) -> None:
    """Move a run that is queued with this attempt, in an engine's queue, to `starting`."""
    if run.state == RunState.QUEUED and run.attempt_number == attempt.number:
        states.run_move(run, RunState.STARTING, why=why, wait_reason="", not_before=None)


def attempt_running(*, attempt: Attempt) -> bool:
    """Record that the ranks run; the run is then running, unless it is stopping."""
    now = clock.now()
    with transaction.atomic():
        launched = attempt.launched or now
        if not states.attempt_move(attempt, AttemptState.RUNNING, started=now, launched=launched):
            return False
        run = Run.objects.get(pk=attempt.run_id)
        _leave_queue(attempt, run, "its job started")
        if run.state == RunState.STARTING and run.attempt_number == attempt.number:
            states.run_move(run, RunState.RUNNING, why="its ranks run", started=run.started or now)
    return True


def attempt_request_sent(*, attempt: Attempt) -> bool:
    """Record that the request was sent to the nodes, which allows the next one."""
    return conditional.update(
        Attempt.objects.filter(pk=attempt.pk, requested__in=ATTEMPT_REQUESTS), requested=""
    )


def attempt_node_exited(*, attempt: Attempt, node: str, exit: Mapping[str, Any]) -> dict[str, Any]:
    """Store the first exit report of a node; returns all reports so far, `{node: report}`."""
    with transaction.atomic():
        # the lock makes two nodes that exit at once see each other
        row = Attempt.objects.select_for_update(no_key=True).get(pk=attempt.pk)
        AttemptShare.objects.filter(attempt=row, node=node).exclude(
            state=AttemptState.EXITED
        ).update(state=AttemptState.EXITED, exit=dict(exit))
        exited = AttemptShare.objects.filter(attempt=row, state=AttemptState.EXITED)
        return {share.node: share.exit or {} for share in exited}


def attempt_exited(
    *, attempt: Attempt, exit_class: str, exit: Mapping[str, Any] | None = None
) -> Run | None:
    """End the attempt; its run ends, is paused, or is queued again with a back-off.

    `exit` is `{reason, rank?, step?, code?}`. Returns the run, or None if the attempt had ended.
    """
    exit_class = ExitClass(exit_class)
    ending = {**(exit or {}), "class": str(exit_class)}
    if exit_class == ExitClass.OUT_OF_MEMORY:
        ending["reason"] = with_memory_hint(
            attempt.run, str(ending.get("reason") or "Out of memory")
        )
    now = clock.now()
    with transaction.atomic():
        why = str(ending.get("reason") or exit_class)
        if not states.attempt_move(
            attempt, AttemptState.EXITED, why=why, exit_class=exit_class, exit=ending, ended=now
        ):
            return None
        AttemptShare.objects.filter(attempt=attempt).update(state=AttemptState.EXITED)
        wake_scheduler()
        run = Run.objects.select_for_update(no_key=True).get(pk=attempt.run_id)
        _leave_queue(attempt, run, "its job ended")
        if run.attempt_number != attempt.number or RunState(run.state) not in states.ACTIVE:
            return run
        result = outcome(
            exit_class=exit_class,
            exit=ending,
            requested=run.requested,
            attempt_requested=attempt.requested,
            retries=Retries.from_dict(run.spec.get("retries") or {}),
            used=run.budgets_used,
            elastic=bool(run.sizes),
        )
        values: dict[str, Any] = {
            "requested": "",
            "budgets_used": result.budgets_used,
            "exit": result.exit,
        }
        if result.state in states.ENDED:
            values |= {"ended": now}
        elif result.state == RunState.QUEUED:
            not_before = now + timedelta(seconds=result.wait_s) if result.wait_s else None
            values |= {"queued_at": now, "not_before": not_before}
            if run.sizes and (attempt.resize or ending.get("cause") == NODE_LOST):
                values["keeps_place_until"] = now + timedelta(seconds=KEEPS_PLACE_S)
        states.run_move(run, result.state, why=result.why, **values)
    if result.state == RunState.FINISHED:
        evaluation_submit(run=run)
    return run
