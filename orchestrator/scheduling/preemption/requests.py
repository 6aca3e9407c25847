"""Asks running runs to checkpoint and stop for the first waiting run of a pool that may preempt.

A preempted run is queued again and uses none of its retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import Max

from orchestrator.runs import events
from orchestrator.runs.models import Attempt, Checkpoint
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.ordering.guarantees import PerTeam, held_by_team, within
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
    holders, guarantees = _holders(now), current.shares.guarantees
    texts: dict[int, str] = {}
    for run in waiting:
        guaranteed = within(run, guarantees, held_by_team(current.nodes, _leaving(holders)))
        if not guaranteed and not any(may_preempt(run, holder) for holder in holders.values()):
            continue
        chosen = choose(run, current.nodes, holders, now.timestamp(), guarantees)
        need = _need(run, guarantees if guaranteed else {})
        requested = [each for each in chosen if request(each, by=run.run, need=need)]
        for each in requested:
            holders[each] = Holder(each, 0, 0, 0.0, leaving=True)
        stopping = waits_for_leaving(run, current.nodes, holders, now.timestamp())
        if stopping:
            texts[run.run] = _text(run, stopping, guaranteed)
    return texts


def _leaving(holders: Mapping[int, Holder]) -> frozenset[int]:
    return frozenset(holder.run for holder in holders.values() if holder.leaving)


def _need(run: QueuedRun, guarantees: PerTeam) -> str:
    """Why the waiting run takes devices of others."""
    devices = guarantees.get((run.pool, run.team))
    if devices:
        return (
            f"Run {run.run} needs its devices: pool {run.pool} guarantees {devices} to team "
            f"{run.team}."
        )
    return f"Run {run.run} of priority {run.priority} needs its devices."


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


def request(run: int, *, by: int | None, need: str) -> bool:
    """Request the preemption of a running run; False if it has just ended or stops otherwise.

    `need` is one sentence about the reason, `by` the run that gets the devices, if one does.
    """
    reason = f"{need} It continues from its checkpoint when devices are free."
    with transaction.atomic():
        attempts = Attempt.objects.filter(
            run=run, state=AttemptState.RUNNING, requested="", run__state=RunState.RUNNING
        )
        attempt = attempts.select_related("run").select_for_update(of=("self",)).first()
        if attempt is None:
            return False
        Attempt.objects.filter(pk=attempt.pk).update(requested=REQUEST)
        event = events.NewEvent(
            type="preempted", data={"reason": reason, "by": by}, attempt=attempt.number
        )
        events.record(run=attempt.run, new=[event])
    dispatch.control(attempt, REQUEST, grace_s=GRACE_S)  # the reaper repeats it
    return True


def _text(run: QueuedRun, stopping: Iterable[int], guaranteed: bool) -> str:
    names = [str(each) for each in stopping]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    noun = "run" if len(names) == 1 else "runs"
    cause = f"the guarantee of team {run.team}" if guaranteed else "its priority"
    return f"Waiting for {noun} {shown} to save a checkpoint and stop, because of {cause}."
