"""REST representations of runs and their objects: JSON data, ids as strings, ISO 8601 times."""

from __future__ import annotations

from typing import Any

from orchestrator.common.units import iso
from orchestrator.runs.models import Artifact, Attempt, Checkpoint, Experiment, Run, RunEvent


def serialize_run(run: Run) -> dict[str, Any]:
    """A run."""
    return {
        "id": str(run.pk),
        "name": run.name,
        "kind": run.kind,
        "state": run.state,
        "spec": run.spec,
        "plan": run.plan,
        "attempt": run.attempt_number,
        "owner": run.owner.username,
        "experiment": run.experiment.name if run.experiment else None,
        "created": iso(run.created),
        "started": iso(run.started),
        "ended": iso(run.ended),
        "prediction": run.prediction,
        "exit": run.exit,
        "priority": run.priority,
        "tags": sorted(tag.name for tag in run.tags.all()),
        "notes": run.notes,
        "devices": run.devices,
        "wait_reason": run.wait_reason or None,
        "summary": run.summary,
        "forked_from": str(run.forked_from_id) if run.forked_from_id else None,
        "version": run.version,
    }


def serialize_attempt(attempt: Attempt) -> dict[str, Any]:
    """An attempt."""
    return {
        "run": str(attempt.run_id),
        "attempt": attempt.number,
        "state": attempt.state,
        "exit_class": attempt.exit_class or None,
        "exit": attempt.exit,
        "placement": attempt.placement,
        "resume_from": attempt.resume_from,
        "created": iso(attempt.created),
        "launched": iso(attempt.launched),
        "started": iso(attempt.started),
        "ended": iso(attempt.ended),
    }


def serialize_event(event: RunEvent) -> dict[str, Any]:
    """An event, as the contract RunEvent; `time` in Unix seconds."""
    return {
        "run": str(event.run_id),
        "attempt": event.attempt or 0,
        "rank": event.rank,
        "seq": event.seq,
        "time": event.time.timestamp(),
        "type": event.type,
        "data": event.data,
    }


def serialize_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint."""
    return {
        "id": str(checkpoint.pk),
        "run": str(checkpoint.run_id),
        "attempt": checkpoint.attempt,
        "step": checkpoint.step,
        "tokens": checkpoint.tokens,
        "path": checkpoint.path,
        "bytes": checkpoint.bytes,
        "created": iso(checkpoint.created),
        "deleted": iso(checkpoint.deleted),
    }


def serialize_artifact(artifact: Artifact) -> dict[str, Any]:
    """An artifact."""
    return {
        "id": str(artifact.pk),
        "run": str(artifact.run_id),
        "name": artifact.name,
        "path": artifact.path,
        "bytes": artifact.bytes,
        "created": iso(artifact.created),
    }


def serialize_experiment(experiment: Experiment) -> dict[str, Any]:
    """An experiment."""
    return {
        "id": str(experiment.pk),
        "name": experiment.name,
        "hypothesis": experiment.hypothesis,
        "notes": experiment.notes,
        "owner": experiment.owner.username,
        "pinned": experiment.pinned,
        "created": iso(experiment.created),
    }
