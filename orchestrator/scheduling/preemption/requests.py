"""Requests running runs to checkpoint and stop for the first waiting run of a pool.

A preempted run is queued again and uses none of its retries. An elastic one continues at once on
the devices that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import Max

from orchestrator.runs import events
from orchestrator.runs.models import Attempt, Checkpoint
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.ordering.guarantees import PerTeam, held_by_team, within
from orchestrator.scheduling.placement import elastic_runs
from orchestrator.scheduling.placement.elastic_runs import ElasticRun
from orchestrator.scheduling.placement.fair_shares import FairShares
from orchestrator.scheduling.placement.requests import Decision, QueuedRun
from orchestrator.scheduling.placement.snapshot import Snapshot
from orchestrator.scheduling.policy import RESERVE_AFTER_S
from orchestrator.scheduling.preemption.victims import (
    Holder,
    choose,
    may_preempt,
    may_shrink,
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
    holders, guarantees = _holders(now, current.shares), current.shares.guarantees
    texts: dict[int, str] = {}
    for run in waiting:
        guaranteed = within(run, guarantees, held_by_team(current.nodes, _leaving(holders)))
        if not guaranteed and not any(
            may_preempt(run, holder) or may_shrink(run, holder) for holder in holders.values()
        ):
            continue
        chosen = choose(run, current.nodes, holders, now.timestamp(), guarantees)
        need = _need(run, guarantees if guaranteed else {})
        for each in chosen.stopped:
            if request(each, by=run.run, need=need):
                holders[each] = replace(holders[each], leaving=True, shrunk=None)
        for each in chosen.shrunk:
            if request(each, by=run.run, need=need, resize="waiting_run"):
                holders[each] = replace(holders[each], leaving=True)
        stopping = waits_for_leaving(run, current.nodes, holders, now.timestamp())
        if stopping:
            texts[run.run] = _text(run, stopping, holders, guaranteed)
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


def _holders(now: datetime, shares: FairShares) -> dict[int, Holder]:
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
            "resize",
        )
    )
    held = list(rows)
    elastic = elastic_runs.open_runs(shares)
    saved = dict(
        Checkpoint.objects.filter(run__in=[row[0] for row in held], deleted=None)
        .values("run")
        .annotate(newest=Max("created"))
        .values_list("run", "newest")
    )
    return {
        row[0]: _holder(*row, saved=saved.get(row[0]), now=now, elastic=elastic.get(row[0]))
        for row in held
    }


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
    resize: Mapping[str, object] | None,
    *,
    saved: datetime | None,
    now: datetime,
    elastic: ElasticRun | None,
) -> Holder:
    since = max(each for each in (started or created, saved) if each is not None)
    running = state == RunState.RUNNING and attempt_state == AttemptState.RUNNING
    young = started is None or now - started < LEAST_RUN
    leaving = bool(run_request) or attempt_request in (REQUEST, "cancel", "pause")
    shrunk = None
    if elastic is not None and not run_request:
        may = bool(resize) if leaving else elastic.devices > elastic.queued.least
        shrunk = elastic.queued if may else None
    return Holder(
        run,
        priority,
        devices if elastic is None else elastic.devices,
        max(0.0, (now - since).total_seconds()),
        leaving=leaving,
        fixed=not running or young or bool(attempt_request),
        shrunk=shrunk,
    )


def request(run: int, *, by: int | None, need: str, resize: str = "") -> bool:
    """Request the preemption of a running run; False if it has just ended or stops otherwise.

    `need` is one sentence about the reason, `by` the run that gets the devices, if one does. With
    `resize` ("waiting_run" or "free_devices") an elastic run continues at once with another size.
    """
    then = "It continues from its checkpoint when devices are free."
    if resize:
        sizes = {"waiting_run": "fewer devices", "free_devices": "more devices"}
        then = f"It continues from its checkpoint at once, on {sizes[resize]}."
    reason = f"{need} {then}"
    data: dict[str, object] = {"reason": reason, "by": by}
    with transaction.atomic():
        attempts = Attempt.objects.filter(
            run=run, state=AttemptState.RUNNING, requested="", run__state=RunState.RUNNING
        )
        attempt = attempts.select_related("run").select_for_update(of=("self",)).first()
        if attempt is None:
            return False
        changes = {"cause": resize, **data} if resize else None
        Attempt.objects.filter(pk=attempt.pk).update(requested=REQUEST, resize=changes)
        kind = "resize_requested" if resize else "preempted"
        event = events.NewEvent(
            type=kind,
            data={**data, "cause": resize, "devices": attempt.devices} if resize else data,
            attempt=attempt.number,
        )
        events.record(run=attempt.run, new=[event])
    dispatch.control(attempt, REQUEST, grace_s=GRACE_S)  # periodic_checks repeats it
    return True


def _text(
    run: QueuedRun, stopping: Iterable[int], holders: Mapping[int, Holder], guaranteed: bool
) -> str:
    names = sorted(stopping)
    shown = ", ".join(map(str, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
    noun = "run" if len(names) == 1 else "runs"
    if all(holders[name].shrunk is not None for name in names):
        return f"Waiting for {noun} {shown} to save a checkpoint and continue on fewer devices."
    cause = f"the guarantee of team {run.team}" if guaranteed else "its priority"
    return f"Waiting for {noun} {shown} to save a checkpoint and stop, because of {cause}."
