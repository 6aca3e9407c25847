"""Why runs wait in an engine, as their owners read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.fleet.models import Pool
from orchestrator.runs import services as runs
from orchestrator.scheduling.cluster_engines.interface import ClusterEngine, JobView
from orchestrator.scheduling.models import EngineJob
from workers.contracts.wire.node_messages import RunState


def explain(
    row: EngineRow, views: Mapping[str, JobView], pools: Mapping[str, Pool], engine: ClusterEngine
) -> None:
    """Store why runs wait in the engine."""
    reasons = {}
    for job in EngineJob.objects.filter(
        engine=row, state=EngineJob.State.PENDING, attempt__run__state=RunState.QUEUED
    ).select_related("attempt__run"):
        run, view = job.attempt.run, views.get(job.name)
        pool = pools.get(run.pool_name)
        if view is None or view.phase != "pending":
            continue
        text = engine.explain(view, pool.engine_settings if pool else {})[:300]
        if text != run.wait_reason:
            reasons[run.pk] = text
    if reasons:
        runs.wait_reasons_set(reasons=reasons)


def wait(job: EngineJob, reason: str) -> None:
    """Store why the job is not submitted yet."""
    if job.attempt.run.wait_reason != reason[:300]:
        runs.wait_reasons_set(reasons={job.attempt.run_id: reason[:300]})


def explain_outage(jobs: Sequence[EngineJob], row: EngineRow) -> None:
    """Store that these jobs wait for an engine that does not answer."""
    text = f"{row.get_kind_display()} of engine {row.name} does not answer; running jobs continue."
    changed: dict[int, Any] = {
        job.attempt.run_id: text
        for job in jobs
        if job.attempt.run.state == RunState.QUEUED and job.attempt.run.wait_reason != text
    }
    if changed:
        runs.wait_reasons_set(reasons=changed)
