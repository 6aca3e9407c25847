"""Reads jobs and their runs, for operators' pages, REST and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Max, QuerySet

from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.accounts.services import require_role
from orchestrator.background_jobs import garbage, store_garbage
from orchestrator.background_jobs.models import Job, JobRun
from orchestrator.background_jobs.registry import JOBS
from orchestrator.common import clock


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job, its schedule and its newest recorded run."""

    name: str
    period_s: float
    has_dry_run: bool
    next_run: datetime | None
    last_ended: datetime | None
    running: bool
    fails: int
    ok_total: int
    failed_total: int
    newest: JobRun | None


def jobs(*, user: User) -> list[JobStatus]:
    """All jobs by name. Raises 403 below operator."""
    require_role(user, Role.OPERATOR, "see jobs")
    return statuses()


def statuses() -> list[JobStatus]:
    """All jobs by name, without a check of the caller."""
    now = clock.now()
    rows = {row.name: row for row in Job.objects.all()}
    newest_ids = JobRun.objects.values("name").annotate(top=Max("id")).values("top")
    newest = {run.name: run for run in JobRun.objects.filter(pk__in=newest_ids)}
    answer = []
    for name, job in JOBS.items():
        row = rows.get(name) or Job(name=name)
        running = bool(row.lease and row.lease_until and row.lease_until >= now)
        answer.append(
            JobStatus(
                name,
                job.period_s,
                job.has_dry_run,
                row.next_run if name in rows else None,
                row.last_ended,
                running,
                row.fails,
                row.ok_total,
                row.failed_total,
                newest.get(name),
            )
        )
    return answer


def job_runs(*, user: User) -> QuerySet[JobRun]:
    """Recorded runs, newest first. Raises 403 below operator."""
    require_role(user, Role.OPERATOR, "see jobs")
    return JobRun.objects.select_related("requested_by").order_by("-id")


def garbage_candidates(*, user: User) -> Iterator[garbage.Candidate]:
    """What the job `garbage` would delete now. Raises 403 below operator."""
    require_role(user, Role.OPERATOR, "see storage")
    return garbage.candidates(now=clock.now())


def store_candidates(*, user: User) -> Iterator[store_garbage.Candidate]:
    """What the job `store-garbage` would delete now. Raises 403 below operator."""
    require_role(user, Role.OPERATOR, "see storage")
    return store_garbage.candidates(now=clock.now())
