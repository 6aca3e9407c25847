"""Attempt reports from the scheduler: placed, launching, running, exited.

Every function is idempotent and ignores late reports and reports about ended attempts. User
actions are in `actions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F

from orchestrator.common import clock, conditional
from orchestrator.common.redis import wake_scheduler
from orchestrator.common.units import count
from orchestrator.runs import states
from orchestrator.runs.lifecycle.retry_budgets import outcome
from orchestrator.runs.models import Attempt, Run
from orchestrator.runs.oom_hint import with_memory_hint
from workers.contracts.specs.run import Retries
from workers.contracts.wire.node_messages import AttemptState, ExitClass, RunState

ATTEMPT_REQUESTS = ("checkpoint", "profile", "memory")  # that an attempt executes without stopping


def attempt_create(
    *,
    run: Run,
    placement: Sequence[Mapping[str, Any]],
    resume_from: Mapping[str, Any] | None = None,
) -> Attempt | None:
    """Move a queued run to `starting` with a new attempt and fence; None if it is not queued.

    `placement` is `[{node, address, devices: [index], node_rank}]`, `resume_from` `{path, step}`.
    """
    run.refresh_from_db()
    if run.state != RunState.QUEUED:
        return None
    where = ", ".join(
        f"{share['node']} ({count(len(share['devices']), 'device')})" for share in placement
    )
    now = clock.now()
    with transaction.atomic():
        moved = states.run_move(
            run,
            RunState.STARTING,
            why=f"placed on {where}",
            attempt_number=F("attempt_number") + 1,
            wait_reason="",
            not_before=None,
            requested="",
        )
        if not moved:
            return None
        return Attempt.objects.create(
            run=run,
            number=run.attempt_number,
            placement=[dict(share) for share in placement],
            resume_from=dict(resume_from) if resume_from else None,
            created=now,
        )


def attempt_dispatched(*, attempt: Attempt) -> bool:
    """Record that the launch orders were sent; False if it was recorded before."""
    return conditional.update(
        Attempt.objects.filter(pk=attempt.pk, dispatched=None), dispatched=clock.now()
    )


def attempt_launching(*, attempt: Attempt) -> bool:
    """Record that the first supervisor runs."""
    return states.attempt_move(attempt, AttemptState.LAUNCHING, launched=clock.now())


def attempt_running(*, attempt: Attempt) -> bool:
    """Record that the ranks run; the run is then running, unless it is stopping."""
    now = clock.now()
    with transaction.atomic():
        launched = attempt.launched or now
        if not states.attempt_move(attempt, AttemptState.RUNNING, started=now, launched=launched):
            return False
        run = Run.objects.get(pk=attempt.run_id)
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
        row = Attempt.objects.select_for_update(no_key=True).get(pk=attempt.pk)
        if node not in row.nodes_exited:
            row.nodes_exited = {**row.nodes_exited, node: dict(exit)}
            row.save(update_fields=["nodes_exited"])
        attempt.nodes_exited = row.nodes_exited
    return dict(row.nodes_exited)


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
        wake_scheduler()
        run = Run.objects.select_for_update(no_key=True).get(pk=attempt.run_id)
        if run.attempt_number != attempt.number or RunState(run.state) not in states.ACTIVE:
            return run
        result = outcome(
            exit_class=exit_class,
            exit=ending,
            requested=run.requested,
            attempt_requested=attempt.requested,
            retries=Retries.from_dict(run.spec.get("retries") or {}),
            used=run.budgets_used,
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
        states.run_move(run, result.state, why=result.why, **values)
    return run
