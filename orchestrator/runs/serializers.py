"""REST representations of runs and their objects: JSON data, ids as strings, ISO 8601 times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django.db.models import QuerySet

from orchestrator.common.compiled_query import CompiledQuery
from orchestrator.common.units import iso
from orchestrator.runs.models import (
    Artifact,
    Attempt,
    Checkpoint,
    Experiment,
    Run,
    RunEvent,
    RunTag,
    StoredCopy,
)
from workers.contracts.wire.node_messages import AttemptState


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
        "tags": sorted(tag.name for tag in _tags_of(run)),
        "notes": run.notes,
        "devices": run.devices,
        "elastic": elastic_of([(run.pk, run.sizes)])[run.pk],
        "wait_reason": run.wait_reason or None,
        "summary": run.summary,
        "forked_from": str(run.forked_from_id) if run.forked_from_id else None,
        "version": run.version,
    }


def elastic_of(
    runs: Iterable[tuple[int, list[dict[str, Any]] | None]],
) -> dict[int, dict[str, Any] | None]:
    """`{run: {min_devices, max_devices, devices, sizes}}` of `(run, sizes)`; None: a fixed size.

    `devices` are those of its open attempt, None without one. One query if any is elastic.
    """
    sizes = dict(runs)
    elastic = [run for run, each in sizes.items() if each]
    held = dict[int, int]()
    if elastic:
        attempts = Attempt.objects.filter(run__in=elastic).exclude(state=AttemptState.EXITED)
        held = {attempt.run_id: attempt.devices for attempt in attempts.order_by("number")}
    return {
        run: {
            "min_devices": each[-1]["devices"],
            "max_devices": each[0]["devices"],
            "devices": held.get(run),
            "sizes": each,
        }
        if each
        else None
        for run, each in sizes.items()
    }


_tags_by_run = CompiledQuery(lambda run: RunTag.objects.filter(run=run), int)


def _tags_of(run: Run) -> Iterable[RunTag]:
    if "tags" in getattr(run, "_prefetched_objects_cache", {}):
        return run.tags.all()
    return _tags_by_run.rows(run.pk)


_COLUMNS: Final = (
    "pk",
    "name",
    "kind",
    "state",
    "spec",
    "plan",
    "attempt_number",
    "owner__username",
    "experiment__name",
    "created",
    "started",
    "ended",
    "prediction",
    "exit",
    "priority",
    "notes",
    "devices",
    "sizes",
    "wait_reason",
    "summary",
    "forked_from_id",
    "version",
)


def serialize_runs(runs: QuerySet[Run]) -> list[dict[str, Any]]:
    """Runs as `serialize_run`, in the order of the query, in two queries without objects.

    A third one if a run is elastic.
    """
    rows = list(runs.values_list(*_COLUMNS))
    tags: dict[int, list[str]] = {row[0]: [] for row in rows}
    named = RunTag.objects.filter(run__in=tags).order_by("name").values_list("run_id", "name")
    for run_id, name in named:
        tags[run_id].append(name)
    place = _COLUMNS.index("sizes")
    elastic = elastic_of((row[0], row[place]) for row in rows)
    return [
        {
            "id": str(pk),
            "name": name,
            "kind": kind,
            "state": state,
            "spec": spec,
            "plan": plan,
            "attempt": attempt,
            "owner": owner,
            "experiment": experiment,
            "created": iso(created),
            "started": iso(started),
            "ended": iso(ended),
            "prediction": prediction,
            "exit": exit_,
            "priority": priority,
            "tags": tags[pk],
            "notes": notes,
            "devices": devices,
            "elastic": elastic[pk],
            "wait_reason": reason or None,
            "summary": summary,
            "forked_from": str(forked_from) if forked_from else None,
            "version": version,
        }
        for (
            pk,
            name,
            kind,
            state,
            spec,
            plan,
            attempt,
            owner,
            experiment,
            created,
            started,
            ended,
            prediction,
            exit_,
            priority,
            notes,
            devices,
            _sizes,
            reason,
            summary,
            forked_from,
            version,
        ) in rows
    ]


def serialize_attempt(attempt: Attempt) -> dict[str, Any]:
    """An attempt."""
    return {
        "run": str(attempt.run_id),
        "attempt": attempt.number,
        "state": attempt.state,
        "exit_class": attempt.exit_class or None,
        "exit": attempt.exit,
        "placement": attempt.placement,
        "devices": attempt.devices,
        "resize": attempt.resize,
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
        "pinned": checkpoint.pinned,
        "stored": _stored(checkpoint.copy),
    }


def _stored(copy: StoredCopy | None) -> dict[str, Any] | None:
    """The copy in the store, while it may be used."""
    if copy is None or copy.deleted is not None:
        return None
    return {
        "key": copy.key,
        "bytes": copy.bytes,
        "fingerprint": copy.fingerprint,
        "created": iso(copy.created),
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
        "stored": _stored(artifact.copy),
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
