"""Jobs of the control plane for operators: schedule, recorded runs, start or dry run."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.background_jobs import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["jobs"])


class JobRunOut(Schema):
    """One run of a job."""

    id: Id
    name: str
    state: str
    dry_run: bool
    attempt: int
    requested_by: str | None
    created: Time
    started: Time | None
    ended: Time | None
    counts: dict[str, int]
    error: str

    @staticmethod
    def resolve_requested_by(row: Any) -> str | None:
        """The name of the user; null: the schedule."""
        by = row["requested_by"] if isinstance(row, dict) else row.requested_by
        return None if by is None else str(by)


class JobOut(Schema):
    """A job with its schedule and newest recorded run."""

    name: str
    period_s: float
    has_dry_run: bool
    running: bool
    next_run: Time | None
    last_ended: Time | None
    fails: int
    ok_total: int
    failed_total: int
    newest: JobRunOut | None


class JobsOut(Schema):
    """All jobs."""

    items: list[JobOut]


class RunRequest(Contract):
    """How to run a job."""

    dry_run: bool = False


@router.get("", response=JobsOut, auth=require_scope("fleet"), summary="List jobs")
def job_list(request: HttpRequest) -> Any:
    """Periodic work: when each job is due, its failures in a row and its newest recorded run."""
    return {"items": selectors.jobs(user=user(request))}


@router.get(
    "/runs", response=list[JobRunOut], auth=require_scope("fleet"), summary="List runs of jobs"
)
@paginated(name="job-runs", newest_first=True)
def job_runs(request: HttpRequest, name: str | None = None) -> Any:
    """Recorded runs, newest first. Frequent jobs record only runs that changed something."""
    rows = selectors.job_runs(user=user(request))
    return rows.filter(name=name) if name else rows


@router.post(
    "/{name}/run",
    response={201: JobRunOut},
    auth=require_scope("fleet"),
    summary="Run a job now",
)
@creates(JobRunOut)
def job_run(request: HttpRequest, name: str, body: RunRequest) -> dict[str, Any]:
    """Queues a run. With `dry_run` it counts what a run would delete and changes nothing."""
    row = services.job_request(name=name, dry_run=body.dry_run, by=user(request))
    return JobRunOut.from_orm(row).model_dump()
