"""One pass over an engine: reads its jobs, applies what changed, submits what is new.

A job is submitted only after a listing without its name, so a lost answer starts nothing twice. If
the engine does not answer, nothing is concluded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta

from django.db.models import F, Q

from orchestrator.common import clock, secret_text
from orchestrator.fleet.cluster_engines import kinds, members
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.fleet.models import Pool
from orchestrator.runs import services as runs
from orchestrator.scheduling.cluster_engines import contact, ends, orders, wait_reasons
from orchestrator.scheduling.cluster_engines.enqueue import enqueue
from orchestrator.scheduling.cluster_engines.interface import (
    ClusterEngine,
    EngineUnavailable,
    JobView,
    SubmissionDelayed,
    SubmissionRefused,
    SubmissionUnclear,
)
from orchestrator.scheduling.cluster_engines.requests import LIVING, is_unwanted, unwanted_jobs
from orchestrator.scheduling.models import EngineJob
from orchestrator.scheduling.reports import attempt_end
from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire.node_messages import AttemptState

log = logging.getLogger(__name__)

MISSING = timedelta(seconds=5)  # not listed for this long: look the job up
UNCLEAR = timedelta(seconds=10)  # a submission without answer may arrive this late
PATIENCE = timedelta(seconds=10)  # for exit reports after the job's end
STOP_AGAIN = timedelta(seconds=10)
SHIPPING = timedelta(minutes=5)
_STATES = EngineJob.State
_WRITTEN = (
    "number",
    "state",
    "engine_state",
    "exit_class",
    "reason",
    "expected_start",
    "submitted",
    "missing_since",
    "ended",
    "hosts",
)


def sync(
    row: EngineRow,
    engine: ClusterEngine,
    *,
    drained: Callable[[], bool] = lambda: True,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Bring jobs and runs into agreement; False if the engine did not answer.

    `drained`: all reports that have arrived are applied, so a missing exit report is missing.
    `stopping`: this process schedules no longer; the pass ends after the current job.
    """
    try:
        views = engine.watch()
        # first, because a stop must not wait for what may time out
        _mark_unwanted(row, views)
        _stop_jobs(row, views, engine)
        contact.refresh(row, engine)
    except EngineUnavailable as error:
        contact.failed(row, str(error))
        wait_reasons.explain_outage(_open_jobs(row), row)
        return False
    contact.answered(row, engine)
    pools = {pool.name: pool for pool in Pool.objects.filter(engine=row)}
    jobs = _open_jobs(row, without=_unchanged(row, views))
    for job in jobs:
        if stopping():
            return True
        try:
            _apply(job, views.get(job.name), engine, row)
            _conclude(job, drained)
        except EngineUnavailable as error:
            contact.failed(row, str(error))
            wait_reasons.explain_outage(jobs, row)
            return False
        except Exception:
            log.exception("Job %s could not be checked; the next pass retries", job.name)
    if row.enabled:
        enqueue(row, pools)
        _submit_jobs(row, views, pools, engine, stopping)
    _stop_jobs(row, views, engine)  # those that have ended or were requeued
    _end_members(row)
    orders.publish_missing([job for job in jobs if job.state == _STATES.PENDING])
    wait_reasons.explain(row, views, pools, engine)
    return True


def _mark_unwanted(row: EngineRow, views: Mapping[str, JobView]) -> None:
    """Mark listed jobs whose runs were cancelled or paused while they waited, to be stopped."""
    listed = [name for name, view in views.items() if view.phase != "ended"]
    jobs = unwanted_jobs().filter(engine=row, name__in=listed)
    keys = list(jobs.values_list("pk", flat=True))
    if keys:
        EngineJob.objects.filter(pk__in=keys).update(stop=True)


def _open_jobs(row: EngineRow, *, without: Collection[int] = (), **only: str) -> list[EngineJob]:
    """Jobs that have not ended, and ended ones whose attempt has not; `without` those keys."""
    rows = EngineJob.objects.filter(engine=row, **only).filter(
        ~Q(state=_STATES.ENDED) | ~Q(attempt__state=AttemptState.EXITED)
    )
    if without:
        keys = set(rows.values_list("pk", flat=True)).difference(without)
        rows = rows.filter(pk__in=sorted(keys))
    large = ("plan", "prediction", "summary", "notes", "rewinds")
    related = rows.select_related("attempt__run__owner", "engine")
    related = related.defer(*(f"attempt__run__{name}" for name in large))
    return list(related.prefetch_related("attempt__shares").order_by("pk"))


def _unchanged(row: EngineRow, views: Mapping[str, JobView]) -> set[int]:
    """Keys of running jobs of which the engine says the same as before, and which may run on.

    Read without objects, because a pass over 1,000 running jobs would cost most for these.
    """
    running = EngineJob.objects.filter(engine=row, state=_STATES.ACTIVE, missing_since=None)
    running = running.exclude(submitted=None).exclude(attempt__state=AttemptState.EXITED)
    running = running.filter(
        attempt__run__state__in=LIVING, attempt__run__attempt_number=F("attempt__number")
    )
    columns = ("pk", "name", "number", "engine_state", "reason", "expected_start", "hosts")
    keys = set()
    for key, name, *before, hosts in running.values_list(*columns):
        view = views.get(name)
        if view is None or view.phase != "active" or list(view.hosts or hosts) != hosts:
            continue
        if before == [view.number, view.state, view.reason[:300], view.expected_start]:
            keys.add(key)
    return keys


def _apply(job: EngineJob, view: JobView | None, engine: ClusterEngine, row: EngineRow) -> None:
    """Store what the engine says about a job."""
    now = clock.now()
    before = job.state
    if before == _STATES.ENDED:
        return
    if view is None and before == _STATES.UNSUBMITTED:
        unclear = job.tried is not None and now - job.tried < UNCLEAR
        if is_unwanted(job.attempt) and not unclear:
            _ended(job, "CANCELLED", str(ExitClass.CANCELLED))
        return
    if view is None:
        job.missing_since = job.missing_since or now
        if now - job.missing_since < MISSING:
            job.save(update_fields=["missing_since"])
            return
        view = engine.lookup(number=job.number, name=job.name)
        if view is None:
            _vanished(job)
            return
    facts = _facts(job)
    job.missing_since = None
    job.number, job.engine_state, job.reason = view.number, view.state, view.reason[:300]
    job.expected_start = view.expected_start
    started = before == _STATES.ACTIVE or job.attempt.state != AttemptState.ASSIGNED
    if view.phase == "pending" and started:
        EngineJob.objects.filter(pk=job.pk).update(stop=True)
        _ended(job, ends.REQUEUED, str(ExitClass.PREEMPTED))
        return
    if view.phase == "ended":
        _ended(job, view.state, str(view.exit_class or ""))
        return
    job.state = _STATES.PENDING if view.phase == "pending" else _STATES.ACTIVE
    if job.submitted is None:
        job.submitted = now
    if view.hosts and job.hosts != list(view.hosts):
        job.hosts = list(view.hosts)
        known = contact.addresses(row)
        _place(job, view.addresses or [known.get(host, host) for host in view.hosts])
    if _facts(job) != facts:  # otherwise 1,000 running jobs would cost 1,000 writes per pass
        _save(job)


def _facts(job: EngineJob) -> tuple[object, ...]:
    """What `_apply` may change."""
    seen = (job.number, job.state, job.engine_state, job.reason, job.expected_start)
    return (*seen, job.missing_since, job.submitted, tuple(job.hosts))


def _place(job: EngineJob, addresses: Sequence[str]) -> None:
    """Store on which of the engine's nodes each part of the attempt runs."""
    placement = []
    for share in job.attempt.placement:
        rank = share["node_rank"]
        known = rank < len(job.hosts)
        host, address = (job.hosts[rank], addresses[rank]) if known else ("", "")
        placement.append({**share, "host": host, "address": address})
    runs.attempt_place(attempt=job.attempt, placement=placement)


def _save(job: EngineJob) -> None:
    """Store what a pass changes; `stop` may have been set since the row was read."""
    job.save(update_fields=_WRITTEN)


def _ended(job: EngineJob, state: str, exit_class: str) -> None:
    job.state, job.engine_state, job.exit_class = _STATES.ENDED, state[:40], exit_class
    job.ended = job.ended or clock.now()
    _save(job)


def _vanished(job: EngineJob) -> None:
    """The engine does not know the job: it lost it, or removed it after its end."""
    attempt = job.attempt
    if attempt.state == AttemptState.ASSIGNED and not attempt.nodes_exited and not job.hosts:
        if job.stop:
            _ended(job, "CANCELLED", str(ExitClass.CANCELLED))
            return
        log.warning("Job %s was lost by its engine; it is submitted again", job.name)
        runs.event_record(
            run=attempt.run,
            type="engine_job_lost",
            data={"engine": job.engine.name, "job": job.number},
            attempt=attempt.number,
        )
        job.number, job.state, job.submitted, job.missing_since = (
            "",
            _STATES.UNSUBMITTED,
            None,
            None,
        )
        _save(job)
        return
    _ended(job, ends.LOST, str(ExitClass.LOST))


def _conclude(job: EngineJob, drained: Callable[[], bool]) -> None:
    """End the attempt of an ended job: by its exit reports, else by the engine's verdict."""
    attempt = job.attempt
    if job.state != _STATES.ENDED or attempt.state == AttemptState.EXITED:
        return
    attempt.refresh_from_db()
    if attempt.state == AttemptState.EXITED:
        return
    exits = attempt.shares.filter(state=AttemptState.EXITED)
    reports = {share.node: share.exit or {} for share in exits}
    nodes = {share["node"] for share in attempt.placement}
    if nodes <= set(reports):
        attempt_end.finish(attempt, reports)
        return
    waited = clock.now() - (job.ended or clock.now())
    if job.submitted is not None and (waited < PATIENCE or not drained()):
        return
    exit_class, reason = ends.verdict(job)
    attempt_end.abandon(
        attempt,
        exit_class=exit_class,
        reason=reason,
        nodes=nodes - set(reports),
        cause=ends.cause(job),
    )


def _submit_jobs(
    row: EngineRow,
    views: Mapping[str, JobView],
    pools: Mapping[str, Pool],
    engine: ClusterEngine,
    stopping: Callable[[], bool],
) -> None:
    """Submit what waits, until the engine does not answer: each further job would wait as long."""
    for job in _open_jobs(row, state=_STATES.UNSUBMITTED):
        if stopping():
            return
        if is_unwanted(job.attempt) or job.name in views:
            continue
        try:
            if not _submit(job, pools.get(job.attempt.run.pool_name), engine):
                return
        except EngineUnavailable as error:
            wait_reasons.wait(job, f"Not submitted to {row.name} yet: {error}.")
            return
        except Exception:
            log.exception("Job %s could not be submitted; the next pass retries", job.name)


def _submit(job: EngineJob, pool: Pool | None, engine: ClusterEngine) -> bool:
    """False if the engine did not answer; then the job may have been submitted."""
    now = clock.now()
    attempt = job.attempt
    if job.tried is not None and now - job.tried < UNCLEAR:
        return True
    if pool is None:
        reason = (
            f"Pool {attempt.run.pool_name} does not belong to engine {job.engine.name} any more."
        )
        attempt_end.abandon(attempt, exit_class=str(ExitClass.USER_ERROR), reason=reason)
        return True
    try:
        order = orders.build(job, pool)
    except (orders.NotPublished, secret_text.Unreadable, ValueError) as error:
        wait_reasons.wait(job, f"Not submitted to {job.engine.name} yet: {error}.")
        return True
    if order is None:
        return True
    job.tried = now
    job.save(update_fields=["tried"])
    try:
        number = engine.submit(order)
    except SubmissionUnclear as error:
        log.warning("Whether %s was submitted is unclear: %s", job.name, error)
        job.tried = clock.now()  # the call may have waited longer than UNCLEAR
        job.save(update_fields=["tried"])
        wait_reasons.wait(
            job, f"{job.engine.name} did not confirm the submission: {error}. Looking it up."
        )
        return False
    except SubmissionDelayed as error:
        job.tried, job.reason = None, str(error)[:300]
        job.save(update_fields=["tried", "reason"])
        wait_reasons.wait(job, f"{job.engine.name} takes no further job now: {error}.")
        return True
    except SubmissionRefused as error:
        _ended(job, "REFUSED", str(ExitClass.USER_ERROR))
        kind = job.engine.get_kind_display()
        reason = f"{kind} refused the job: {error}. {error.hint}".strip()
        attempt_end.abandon(attempt, exit_class=str(ExitClass.USER_ERROR), reason=reason)
        return True
    job.number, job.state, job.submitted = number, _STATES.PENDING, clock.now()
    _save(job)
    runs.attempts_dispatched(attempts=[attempt])
    runs.event_record(
        run=attempt.run,
        type="engine_job_submitted",
        data={
            "engine": job.engine.name,
            "kind": job.engine.kind,
            "job": number,
            "partition": kinds.target_of(job.engine, pool.engine_settings),
            "nodes": order.nodes,
        },
        attempt=attempt.number,
    )
    return True


def _stop_jobs(row: EngineRow, views: Mapping[str, JobView], engine: ClusterEngine) -> None:
    """Cancel listed jobs whose attempts have ended, or must be killed."""
    now = clock.now()
    numbers, stopped = [], []
    alive = [name for name, view in views.items() if view.phase != "ended"]
    stopping = EngineJob.objects.filter(engine=row, name__in=alive)
    stopping = stopping.filter(Q(stop=True) | Q(attempt__state=AttemptState.EXITED))
    for job in stopping.select_related("attempt"):
        view = views[job.name]
        if view.phase == "ended" or (job.stop_sent and now - job.stop_sent < STOP_AGAIN):
            continue
        # ranks whose exit is reported ship their last telemetry before they end by themselves
        ended_at = job.attempt.ended
        shipping = ended_at is not None and now - ended_at < SHIPPING and not job.stop
        if shipping and view.phase == "active":
            continue
        numbers.append(view.number)
        stopped.append(job.pk)
    if numbers:
        try:
            engine.cancel(numbers)
        except EngineUnavailable as error:
            log.warning("Jobs of %s are cancelled later: %s", row.name, error)
            return
        EngineJob.objects.filter(pk__in=stopped).update(stop_sent=now)


def _end_members(row: EngineRow) -> None:
    """Record that supervisors of jobs that ended recently have ended."""
    now = clock.now()
    ended = EngineJob.objects.filter(engine=row, attempt__state=AttemptState.EXITED)
    ids = list(
        ended.filter(state=_STATES.ENDED, ended__gt=now - timedelta(minutes=5)).values_list(
            "attempt_id", flat=True
        )
    )
    members.members_end(attempt_ids=ids, now=now)
