"""Requests of operators: run a job now, or count what it would change."""

from __future__ import annotations

from django.db import transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.background_jobs.models import JobRun
from orchestrator.background_jobs.registry import JOBS
from orchestrator.common import clock
from orchestrator.common.errors import conflict, invalid, missing_object

MOST_QUEUED = 20


def job_request(*, name: str, dry_run: bool, by: User) -> JobRun:
    """Queue a run of the job; a worker starts it within seconds.

    Raises 403 below operator, 404 for an unknown job, 409 while many runs are queued.
    """
    accounts.require_role(by, Role.OPERATOR, "run jobs")
    if name not in JOBS:
        raise missing_object("job", name)
    if dry_run and not JOBS[name].has_dry_run:
        raise invalid("dry_run", f"the job {name} has no dry run", "Send false.")
    if JobRun.objects.filter(state=JobRun.State.QUEUED).count() >= MOST_QUEUED:
        raise conflict(
            f"{MOST_QUEUED} runs of jobs are queued. Check that `manage.py jobs` is running.",
            type="too-many-queued",
        )
    now = clock.now()
    with transaction.atomic():
        row = JobRun.objects.create(
            name=name, dry_run=dry_run, requested_by=by, created=now, due=now
        )
        accounts.audit(actor=by, action="job.run", target=f"job:{name}", data={"dry_run": dry_run})
    return row
