"""Simulates the queue as it is, stores when each waiting run starts, and reads it for pages.

Runs in a job, not in the scheduler's pass. Writes one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from orchestrator.common import clock
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.models import QueueEstimate
from orchestrator.scheduling.placement import snapshot
from orchestrator.scheduling.policy import QueuedRun
from orchestrator.scheduling.preemption.resizing import STARTUP_S
from orchestrator.scheduling.simulation import estimates
from workers.contracts.wire.node_messages import AttemptState

NAME = "starts"
FRESH = timedelta(seconds=120)  # older estimates are not shown
RECENT = timedelta(days=1)  # runs submitted since then may be submitted again
LEAST_HISTORY_S = 3600.0  # a shorter one says little about the runs to come
_RECENT_RUNS = 300
_EARLY, _LATE = 0.8, 1.25  # of the remaining time that measured progress predicts


class StartEstimate(NamedTuple):
    """When a waiting run starts: the middle and 80% of the simulated starts."""

    start: datetime
    low: datetime
    high: datetime
    sooner: str


def compute() -> dict[str, int]:
    """Simulate the queue and store the estimates; `{waiting, estimated}`."""
    current, now = snapshot.take(), clock.now()
    if not current.queue:
        QueueEstimate.objects.filter(name=NAME).exclude(starts={}).update(starts={}, computed=now)
        return {"estimated": 0}
    policy = policy_of(current)
    time = now.timestamp()
    starts = estimates.estimate_starts(
        current.queue,
        current.nodes,
        time,
        policy=policy,
        ends=ends(time),
        recent=recent(now),
        budget_s=estimates.BUDGET_S,
    )
    hints = estimates.sooner(
        current.queue, current.nodes, time, policy=policy, sizes=_sizes(current.queue)
    )
    rows: dict[str, list[Any]] = {}
    for run in current.queue:
        estimate = starts.get(run.run)
        if estimate is not None or run.run in hints:
            times = (
                [estimate.start, estimate.low, estimate.high] if estimate else [None, None, None]
            )
            rows[str(run.run)] = [*times, hints.get(run.run, "")]
    QueueEstimate.objects.update_or_create(name=NAME, defaults={"computed": now, "starts": rows})
    return {"estimated": len(starts)}


def policy_of(current: snapshot.Snapshot) -> estimates.Policy:
    """What the scheduler's decision needs besides queue and nodes."""
    return estimates.Policy(
        current.quotas,
        current.shares.quotas,
        current.pool_priority,
        current.shares.usage,
        guarantees=current.shares.guarantees,
    )


def load() -> dict[int, tuple[StartEstimate | None, str]]:
    """`{run: (estimate, what would start it sooner)}`; empty if they are old."""
    row = QueueEstimate.objects.filter(name=NAME, computed__gt=clock.now() - FRESH).first()
    if row is None:
        return {}
    return {int(run): (_estimate(values), values[3]) for run, values in row.starts.items()}


def _estimate(values: Sequence[Any]) -> StartEstimate | None:
    if values[0] is None:
        return None
    start, low, high = (clock.from_unix(value) for value in values[:3])
    return StartEstimate(start, low, high, values[3])


def ends(now: float) -> dict[int, tuple[float, float]]:
    """`{run: (earliest, latest end)}` of running runs by their measured progress or limit."""
    rows = (
        Attempt.objects.exclude(state=AttemptState.EXITED)
        .order_by()
        .values_list(
            "run_id",
            "started",
            "created",
            "run__spec__resources__max_seconds",
            "run__summary__eta_s",
            "run__last_seen",
            "run__prediction__step_time_s",
            "run__spec__train__steps",
        )
    )
    results = {}
    for run, started, created, limit, eta_s, seen, step_time_s, steps in rows:
        begun = (started or created).timestamp()
        until = begun + limit if limit else float("inf")
        if eta_s is not None and seen is not None:
            left, origin = float(eta_s), seen.timestamp()
        elif step_time_s and steps:
            left, origin = STARTUP_S + float(step_time_s) * int(steps), begun
        elif limit:
            left, origin = float(limit), begun
        else:
            continue
        low, high = origin + _EARLY * left, min(until, origin + _LATE * left)
        results[run] = max(now, min(low, high)), max(now, high)
    return results


def recent(now: datetime) -> list[QueuedRun]:
    """Runs of the last day in the order of submission, as they may be submitted again."""
    rows = (
        Run.objects.filter(created__gte=now - RECENT)
        .exclude(devices=0)
        .order_by("-created")
        .values_list(
            "pk",
            "devices",
            "pool_name",
            "created",
            "priority",
            "owner__username",
            "started",
            "ended",
            "prediction__step_time_s",
            "spec__train__steps",
            "spec__resources__max_seconds",
            "spec__resources__device",
        )[:_RECENT_RUNS]
    )
    results = []
    for (
        pk,
        devices,
        pool,
        created,
        priority,
        owner,
        started,
        ended,
        step,
        steps,
        most,
        kind,
    ) in rows:
        lasted = (ended - started).total_seconds() if started and ended else None
        if lasted is None and step and steps:
            lasted = float(step) * int(steps)
        if lasted is None:
            lasted = most
        if lasted is None:
            continue
        results.append(
            QueuedRun(
                run=pk,
                devices=devices,
                pool=pool,
                queued_at=created.timestamp(),
                priority=priority,
                owner=owner,
                device=kind,
                max_seconds=most,
                expected_s=max(1.0, float(lasted)),
            )
        )
    results.reverse()
    span = results[-1].queued_at - results[0].queued_at if results else 0.0
    return results if span >= LEAST_HISTORY_S else []


def _sizes(queue: Sequence[QueuedRun]) -> dict[int, list[int]]:
    """Smaller numbers of devices with which a run's plan keeps its global batch, largest first.

    Of elastic runs those below the smallest one that they may use anyway.
    """
    least = {run.run: run.least for run in queue}
    plans = Run.objects.filter(
        pk__in=[run.run for run in queue[: estimates.MOST_RUNS]], plan__isnull=False
    )
    sizes = {}
    for run, devices, plan in plans.values_list("pk", "devices", "plan"):
        if plan is None:
            continue
        dp, micro = plan.get("dp") or 1, plan.get("micro_batch_size") or 1
        batch = (plan.get("global_batch_size") or 0) // micro
        if dp > 1 and devices % dp == 0 and batch:
            ways = [count for count in range(dp - 1, 0, -1) if batch % count == 0]
            smaller = [devices // dp * count for count in ways]
            sizes[run] = [size for size in smaller if size < least[run]]
    return sizes
