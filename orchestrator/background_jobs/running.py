"""Runs a job once under its lease, records the run, and delays the next one after a failure.

Does not depend on Celery: the database holds the schedule, messages only start what is due.
"""

from __future__ import annotations

import logging
import secrets
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction
from django.db.models import F, Q

from orchestrator.background_jobs.models import Job, JobRun
from orchestrator.background_jobs.registry import JOBS, JobType, Work
from orchestrator.common import clock, conditional

log = logging.getLogger(__name__)

LEASE: Final = timedelta(minutes=5)  # renewed per batch
RETRY_S: Final = 30.0  # doubled per failure in a row
MOST_DOUBLINGS: Final = 7
RESEND: Final = timedelta(seconds=60)  # a message that started nothing for this long is lost


class LeaseLost(Exception):
    """Another process has taken the job over."""


def due_jobs(*, now: datetime) -> list[str]:
    """Claim the due runs of the schedule; returns their jobs. Concurrent callers share them."""
    for name in JOBS.keys() - set(Job.objects.values_list("name", flat=True)):
        Job.objects.get_or_create(name=name, defaults={"next_run": now})
    claimed = []
    for job in Job.objects.filter(name__in=list(JOBS), next_run__lte=now):
        later = now + timedelta(seconds=JOBS[job.name].period_s)
        if conditional.update(Job.objects.filter(pk=job.pk, next_run=job.next_run), next_run=later):
            claimed.append(job.name)
    return claimed


def due_requests(*, now: datetime) -> list[int]:
    """Claim the queued runs whose message is due; returns their ids."""
    queued = JobRun.objects.filter(state=JobRun.State.QUEUED, due__lte=now)
    return [
        row.pk
        for row in queued.order_by("pk")[:20]
        if conditional.update(queued.filter(pk=row.pk, due=row.due), due=now + RESEND)
    ]


def run_scheduled(name: str) -> JobRun | None:
    """Run a job of the schedule; None if it is running elsewhere, or changed nothing."""
    job = JOBS[name]
    now, lease = clock.now(), secrets.token_hex(16)
    if not _take(job, lease, now):
        log.info("Job %s is running elsewhere", name)
        return None
    fails = Job.objects.values_list("fails", flat=True).get(name=name)
    row = JobRun(name=name, state=JobRun.State.RUNNING, created=now, started=now, attempt=fails + 1)
    if not job.frequent:
        row.save()
    return _run(job, row, lease)


def run_requested(id: int) -> JobRun | None:
    """Run what a user requested; None if it was started before. Waits while the job is running."""
    row = JobRun.objects.filter(pk=id).first()
    if row is None or row.name not in JOBS:
        return None
    job, lease, now = JOBS[row.name], secrets.token_hex(16), clock.now()
    queued = JobRun.objects.filter(pk=id, state=JobRun.State.QUEUED)
    if not row.dry_run and not _take(job, lease, now):
        return None  # still queued: its message is sent again
    if not conditional.update(queued, state=JobRun.State.RUNNING, started=now):
        _release(job, lease)
        return None
    row.refresh_from_db()
    return _run(job, row, lease)


def close_abandoned(*, now: datetime) -> int:
    """Mark runs as failed whose process ended without a result; returns how many."""
    abandoned = 0
    for row in JobRun.objects.filter(state=JobRun.State.RUNNING, started__lt=now - LEASE):
        held = Job.objects.filter(name=row.name, lease_until__gte=now).exclude(lease="")
        if not held.exists() and conditional.update(
            JobRun.objects.filter(pk=row.pk, state=JobRun.State.RUNNING),
            state=JobRun.State.FAILED,
            ended=now,
            error="The worker ended during this run; the next run does the rest.",
        ):
            abandoned += 1
    return abandoned


def _run(job: JobType, row: JobRun, lease: str) -> JobRun | None:
    try:
        counts = job.work(Work(dry_run=row.dry_run, renew=lambda: _renew(job, row, lease)))
    except Exception as error:  # every failure is recorded and retried
        log.exception("Job %s failed", job.name)
        row.error = f"{type(error).__name__}: {error}"[:500]
        row.state = JobRun.State.FAILED
        counts = {}
    else:
        row.state = JobRun.State.OK
    row.counts, row.ended = counts, clock.now()
    ok = row.state == JobRun.State.OK
    with transaction.atomic():
        if not row.dry_run:
            _finish(job, lease, ok=ok, now=row.ended)
        if row.pk or not ok or any(counts.values()):
            row.save()
    return row if row.pk else None


def _take(job: JobType, lease: str, now: datetime) -> bool:
    Job.objects.get_or_create(name=job.name, defaults={"next_run": now})
    free = Job.objects.filter(Q(lease="") | Q(lease_until__lt=now), name=job.name)
    return conditional.update(free, lease=lease, lease_until=now + LEASE)


def _renew(job: JobType, row: JobRun, lease: str) -> None:
    if row.dry_run:
        return
    mine = Job.objects.filter(name=job.name, lease=lease)
    if not conditional.update(mine, lease_until=clock.now() + LEASE):
        raise LeaseLost(f"another process runs the job {job.name}")


def _release(job: JobType, lease: str) -> None:
    Job.objects.filter(name=job.name, lease=lease).update(lease="", lease_until=None)


def _finish(job: JobType, lease: str, *, ok: bool, now: datetime) -> None:
    mine = Job.objects.filter(name=job.name, lease=lease)
    if ok:
        mine.update(fails=0, ok_total=F("ok_total") + 1, last_ended=now)
    else:
        fails = mine.values_list("fails", flat=True).first() or 0
        wait = timedelta(seconds=RETRY_S * 2 ** min(fails, MOST_DOUBLINGS))
        mine.update(
            fails=F("fails") + 1,
            failed_total=F("failed_total") + 1,
            last_ended=now,
            next_run=now + wait,
        )
    _release(job, lease)
