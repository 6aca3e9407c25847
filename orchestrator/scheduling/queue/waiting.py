"""Reads the waiting runs in the order of the scheduler's newest decision; never runs the policy.

Omits runs that the user may not see. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from django.conf import settings
from django.db.models import Count, QuerySet, Sum

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling.models import EngineJob
from orchestrator.scheduling.placement import reasons
from orchestrator.scheduling.queue import decision_store, start_estimates
from workers.contracts.wire.node_messages import RunState


@dataclass(frozen=True)
class QueueEntry:
    """A waiting run; `position` counts over the full queue, `may_start` is None if unknown.

    `earliest` and `latest` hold 80% of the simulated starts, `sooner` says what would start it
    sooner.
    """

    run: Run
    position: int
    reason: str
    may_start: datetime | None
    earliest: datetime | None = None
    latest: datetime | None = None
    sooner: str = ""


@dataclass(frozen=True)
class QueuePage:
    """Some entries in order; `runs` and `devices` count all waiting runs that the user may see."""

    entries: list[QueueEntry]
    runs: int
    devices: int
    more: int  # runs behind the last entry


def queue_page(*, user: User, limit: int, after: int = 0) -> QueuePage:
    """The first `limit` waiting runs behind a position. Runs submitted since the decision follow
    at the end.

    Reads objects only for these entries: a queue of 10,000 runs costs little more than a short one.
    """
    decided, visible = decision_store.load(), _waiting_visible_to(user)
    if after == 0 and (first := _first(visible, decided, limit)) is not None:
        sums = visible.order_by().aggregate(runs=Count("id"), devices=Sum("devices"))
        positions = {pk: decided.position(pk) or 0 for pk in first}
        entries = _entries(first, positions, decided)
        return QueuePage(
            entries, sums["runs"], sums["devices"] or 0, max(0, sums["runs"] - len(first))
        )
    ordered = visible.order_by("-priority", "queued_at", "id")
    rows = list(ordered.values_list("pk", "devices"))
    positions, last = {}, len(decided)
    for pk, _ in rows:
        position = decided.position(pk)
        if position is None:
            position = last = last + 1
        positions[pk] = position
    behind = sorted((pk for pk in positions if positions[pk] > after), key=positions.__getitem__)
    entries = _entries(behind[:limit], positions, decided)
    return QueuePage(
        entries, len(rows), sum(devices for _, devices in rows), max(0, len(behind) - limit)
    )


def queue_entries(*, user: User, limit: int, after: int = 0) -> list[QueueEntry]:
    """The entries of `queue_page`; the first ones without reading the rest of the queue."""
    if after == 0:
        decided = decision_store.load()
        if (first := _first(_waiting_visible_to(user), decided, limit)) is not None:
            return _entries(first, {pk: decided.position(pk) or 0 for pk in first}, decided)
    return queue_page(user=user, limit=limit, after=after).entries


def _waiting_visible_to(user: User) -> QuerySet[Run]:
    visible = runs.runs_visible_to(user=user).filter(state=RunState.QUEUED)
    return visible.select_related(None)


def _first(
    visible: QuerySet[Run], decided: decision_store.StoredDecision, limit: int
) -> list[int] | None:
    """The first `limit` runs of the decision that the user may see; None if there are fewer."""
    if len(decided) < limit:
        return None
    matches: list[int] = []
    order, start, count = decided.runs, 0, max(2 * limit, 50)
    while start < len(order):
        some = order[start : start + count]
        waiting = set(visible.filter(pk__in=some).values_list("pk", flat=True))
        matches += [pk for pk in some if pk in waiting]
        if len(matches) >= limit:
            return matches[:limit]
        start, count = start + count, 4 * count
    return None


def queue_visible_to(*, user: User) -> list[QueueEntry]:
    """All entries of the queue that the user may see."""
    return queue_page(user=user, limit=10**9).entries


class ExpectedStart(NamedTuple):
    """When a waiting run starts, as far as known; `sooner`: what would start it sooner."""

    start: datetime | None
    earliest: datetime | None
    latest: datetime | None
    sooner: str


def expected_start(run: Run) -> ExpectedStart | None:
    """The estimate for a queued run; None for other runs. The caller checks visibility."""
    if run.state != RunState.QUEUED:
        return None
    estimate, sooner = start_estimates.load().get(run.pk, (None, ""))
    if estimate is not None:
        return ExpectedStart(estimate.start, estimate.low, estimate.high, sooner)
    wait = decision_store.load().wait(run.pk)
    return ExpectedStart(wait.may_start if wait else None, None, None, sooner)


def waiting_count(*, user: User, pool: str) -> int:
    """Waiting runs of a pool that the user may see."""
    visible = runs.runs_visible_to(user=user).filter(state=RunState.QUEUED, pool_name=pool)
    return visible.select_related(None).count()


def decision_age_s() -> float | None:
    """Age in seconds of a stale decision about the queue; None while it is fresh."""
    age = decision_store.age(clock.now())
    late = age is not None and age.total_seconds() > max(15.0, 5 * settings.ENV.tick_s)
    return age.total_seconds() if age is not None and late else None


def _entries(
    chosen: Sequence[int], positions: dict[int, int], decided: decision_store.StoredDecision
) -> list[QueueEntry]:
    """The entries of these runs, in this order; those that no longer exist are left out."""
    if not chosen:
        return []
    waiting = runs.waiting_runs(ids=chosen)
    jobs = EngineJob.objects.filter(state=EngineJob.State.PENDING, attempt__run__in=waiting)
    simulated = start_estimates.load()
    starts = dict(jobs.values_list("attempt__run_id", "expected_start"))
    entries = []
    for pk in chosen:
        if (run := waiting.get(pk)) is None:
            continue
        wait = decided.wait(pk)
        reason = wait.reason if wait else run.wait_reason or reasons.UNDECIDED
        may_start = wait.may_start if wait else starts.get(pk)
        estimate, sooner = simulated.get(pk, (None, ""))
        entry = QueueEntry(run, positions[pk], reason, may_start, sooner=sooner)
        if estimate is not None:
            entry = replace(
                entry, may_start=estimate.start, earliest=estimate.low, latest=estimate.high
            )
        entries.append(entry)
    return entries
