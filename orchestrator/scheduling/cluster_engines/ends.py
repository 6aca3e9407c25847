"""Why an attempt in an engine's job ended: what its supervisors report, and what the engine says.

A job that is cancelled, preempted or at its time limit looks the same to a supervisor: SIGTERM. The
engine distinguishes them. Pure but for one query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.fleet.models import Engine
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.models import EngineJob
from workers.contracts.exit_classes import ExitClass

REQUEUED = "REQUEUED"
LOST = "LOST"

_REASONS = {
    "CANCELLED": "Job {number} was cancelled in {kind}, not by Orrery.",
    "DELETED": "Job {number} was deleted in {kind}, not by Orrery.",
    "DEACTIVATED": "Job {number} was deactivated in {kind}, not by Orrery.",
    "REQUEUE_LIMIT": "{kind} gave up starting job {number}: its pods were not ready in time.",
    "REJECTED": "An admission check of {kind} refused job {number}.",
    "DRAINED": "Job {number} left a node that is being drained; the run continues from its newest "
    "checkpoint.",
    "NODE_SHUTDOWN": "A node of job {number} shut down.",
    "NODE_PRESSURE": "A node of job {number} ended it to save its own memory or disk.",
    "REVOKED": "Job {number} was revoked in {kind}.",
    "PREEMPTED": "{kind} preempted job {number}; the run continues from its newest checkpoint.",
    REQUEUED: "{kind} requeued job {number}; the run continues in a new job from its newest "
    "checkpoint.",
    "TIMEOUT": "{kind} ended job {number} at its time limit. Set resources.max_seconds, or choose "
    "a pool with a longer limit; a retry continues from the newest checkpoint.",
    "DEADLINE": "{kind} ended job {number} at its deadline.",
    "NODE_FAIL": "A node of job {number} failed ({kind}: NODE_FAIL).",
    "BOOT_FAIL": "{kind} could not start a node for job {number} (BOOT_FAIL).",
    "OUT_OF_MEMORY": "Job {number} exceeded its memory (OUT_OF_MEMORY). Set resources.memory_gb "
    "higher, or use less.",
    LOST: "{kind} no longer knows job {number}, and its supervisors sent no exit report.",
}
# Orrery stopped it itself, or did not submit it any more
_BY_ORRERY = "Orrery cancelled job {number}, because its run was {what}."
_REQUESTED = {"preempt": "preempted", "cancel": "cancelled", "pause": "paused"}
_NOT_SUBMITTED = "The run was cancelled or paused before its job was submitted."
_STOPPED = frozenset({"CANCELLED", "DELETED", "DEACTIVATED"})
_UNREPORTED = "Job {number} ended in {kind} as {state} before its supervisor reported. {look}"
_LOOK = {
    Engine.Kind.SLURM: "See /tmp/orrery-*-{number}.log on the job's first node; check the engine's "
    "home, python and source, and that its nodes reach the broker.",
    Engine.Kind.KUBERNETES: "See kubectl logs --selector "
    "jobset.sigs.k8s.io/jobset-name={number}; check the engine's claim, image, python and source, "
    "and that its pods reach the broker.",
}


def is_undecided(attempt: Attempt, exit_class: str) -> bool:
    """Whether the engine must first say why its job stopped the ranks."""
    if exit_class != ExitClass.PREEMPTED or attempt.requested or not attempt.in_engine:
        return False
    job = EngineJob.objects.filter(attempt=attempt).first()
    return job is not None and job.state != EngineJob.State.ENDED


def refined(
    attempt: Attempt, exit_class: str, exit: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """Exit class and exit after what the engine said about the ended job."""
    if attempt.requested or not attempt.in_engine:
        return exit_class, exit
    job = EngineJob.objects.select_related("engine", "attempt").filter(attempt=attempt).first()
    if job is None:
        return exit_class, exit
    if exit_class == ExitClass.CANCELLED and not _is_stopped_in_engine(job):
        return exit_class, {**exit, "cause": runs.RUN_STOPPED}  # the request of a stopped run
    if exit_class != ExitClass.PREEMPTED or not job.exit_class:
        return exit_class, exit
    stated = {"class": job.exit_class, "reason": reason(job)}
    if since := cause(job):
        stated["cause"] = since
    return job.exit_class, {**exit, **stated}


def verdict(job: EngineJob) -> tuple[str, str]:
    """`(exit class, reason)` of an ended job whose supervisors did not report an exit."""
    return job.exit_class or str(ExitClass.INFRASTRUCTURE), reason(job)


def cause(job: EngineJob) -> str:
    """RUN_STOPPED if Orrery ended the job of a run that was stopped while the job waited.

    The run may have been queued again since; the end of its earlier job must not end it.
    """
    ended_it = job.engine_state in _STOPPED and not _is_stopped_in_engine(job)
    return runs.RUN_STOPPED if ended_it and not job.attempt.requested else ""


def _is_stopped_in_engine(job: EngineJob) -> bool:
    """Whether the job was cancelled, not by Orrery."""
    return job.engine_state in _STOPPED and bool(job.number) and job.stop_sent is None


def reason(job: EngineJob) -> str:
    """The engine's verdict as a sentence."""
    if job.engine_state in _STOPPED and not job.number:
        return _NOT_SUBMITTED
    if job.engine_state in _STOPPED and job.stop_sent is not None:
        what = _REQUESTED.get(job.attempt.requested, "cancelled or paused while it waited")
        return _BY_ORRERY.format(number=job.number, what=what)
    text = _REASONS.get(job.engine_state, _UNREPORTED).format(
        number=job.number,
        kind=job.engine.get_kind_display(),
        state=job.engine_state,
        look=_LOOK[Engine.Kind(job.engine.kind)].format(number=job.number),
    )
    if job.reason and job.engine.kind == Engine.Kind.KUBERNETES:
        text += f" (Kubernetes: {job.reason})"
    return text
