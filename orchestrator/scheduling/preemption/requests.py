"""Asks running runs to checkpoint and stop for the first waiting run of a pool that may preempt.

A preempted run is queued again and uses none of its retries.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import Max

from orchestrator.runs import events
from orchestrator.runs.models import Attempt, Checkpoint
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.placement.requests import Decision, QueuedRun
from orchestrator.scheduling.placement.snapshot import Snapshot
from orchestrator.scheduling.policy import RESERVE_AFTER_S
from orchestrator.scheduling.preemption.victims import (
    Holder,
    choose,
    may_preempt,
    waits_for_leaving,
)
from workers.contracts.wire.node_messages import AttemptState, RunState

REQUEST: Final = "preempt"
LEAST_RUN: Final = timedelta(seconds=60)  # a run that has just started is not preempted
GRACE_S: Final = 30.0  # for its checkpoint


def preempt(current: Snapshot, decision: Decision, *, now: datetime) -> dict[int, str]:
    """Preempt for the first run of each pool; `{waiting run: what it waits for}`.

    May run again at any time: devices of runs that already stop count as free.
    """
    if not settings.ENV.preemption:
        return {}
    waiting = _first_of_pools(current, decision, now)
    if not waiting:
        return {}
    holders = _holders(now)
    texts: dict[int, str] = {}
    for run in waiting:
        if not any(may_preempt(run, holder) for holder in holders.values()):
            continue
        chosen = choose(run, current.nodes, holders, now.timestamp())
        requested = [each for each in chosen if _request(each, run)]
        for each in requested:
            holders[each] = Holder(each, 0, 0, 0.0, leaving=True)
        stopping = waits_for_leaving(run, current.nodes, holders, now.timestamp())
        if stopping:
            texts[run.run] = _text(run, stopping)
    return texts


def _first_of_pools(current: Snapshot, decision: Decision, now: datetime) -> list[QueuedRun]:
    """Per pool the first waiting run that lacks only devices, if it has waited a little."""
    queued = {run.run: run for run in current.queue}
    first: dict[str, QueuedRun] = {}
    for wait in decision.waits:
        if wait.lacks_devices and (run := queued.get(wait.run)) is not None:
            first.setdefault(run.pool, run)
    late = now.timestamp() - RESERVE_AFTER_S
    return [run for run in first.values() if run.queued_at <= late]


def _holders(now: datetime) -> dict[int, Holder]:
    """The runs of Orrery's own nodes that hold devices."""
    rows = (
        Attempt.objects.filter(allocations__released=None, allocations__isnull=False)
        .order_by()
        .distinct()
        .values_list(
            "run_id",
            "run__priority",
            "run__devices",
            "run__state",
            "run__requested",
            "state",
            "requested",
            "started",
            "created",
        )
    )
    held = list(rows)
    saved = dict(
        Checkpoint.objects.filter(run__in=[row[0] for row in held], deleted=None)
        .values("run")
        .annotate(newest=Max("created"))
        .values_list("run", "newest")
    )
    return {row[0]: _holder(*row, saved=saved.get(row[0]), now=now) for row in held}


def _holder(
    run: int,
    priority: int,
    devices: int,
    state: str,
    run_request: str,
    attempt_state: str,
    attempt_request: str,
    started: datetime | None,
    created: datetime,
    *,
    saved: datetime | None,
    now: datetime,
) -> Holder:
    since = max(each for each in (started or created, saved) if each is not None)
    running = state == RunState.RUNNING and attempt_state == AttemptState.RUNNING
    young = started is None or now - started < LEAST_RUN
    return Holder(
        run,
        priority,
        devices,
        max(0.0, (now - since).total_seconds()),
        leaving=bool(run_request) or attempt_request in (REQUEST, "cancel", "pause"),
        fixed=not running or young or bool(attempt_request),
    )


def _request(run: int, waiting: QueuedRun) -> bool:
    """Request the preemption of a running run; False if it has just ended or stops otherwise."""
    reason = (
        f"Run {waiting.run} of priority {waiting.priority} needs its devices. It continues from "
        "its checkpoint when devices are free."
    )
    with transaction.atomic():
        attempts = Attempt.objects.filter(
            run=run, state=AttemptState.RUNNING, requested="", run__state=RunState.RUNNING
        )
        attempt = attempts.select_related("run").select_for_update(of=("self",)).first()
        if attempt is None:
            return False
        Attempt.objects.filter(pk=attempt.pk).update(requested=REQUEST)
        event = events.NewEvent(
            type="preempted", data={"reason": reason, "by": waiting.run}, attempt=attempt.number
        )
        events.record(run=attempt.run, new=[event])
    dispatch.control(attempt, REQUEST, grace_s=GRACE_S)  # the reaper repeats it
    return True


def _text(run: QueuedRun, stopping: Iterable[int]) -> str:
    names = [str(each) for each in stopping]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    noun = "run" if len(names) == 1 else "runs"
    return f"Waiting for {noun} {shown} to save a checkpoint and stop, because of its priority."
