"""The write interface of `runs`: re-exports the services of its modules, records what runs report.

Transitions are in `states`, user actions in `lifecycle.actions`, attempt reports in
`lifecycle.attempts`, submission in `submission.submit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q

from orchestrator.common import clock, conditional, live
from orchestrator.runs import events
from orchestrator.runs.events import NewEvent
from orchestrator.runs.experiments import (
    experiment_create,
    experiment_update,
    may_edit_experiment,
)
from orchestrator.runs.lifecycle.actions import (
    external_finish,
    may_manage,
    run_cancel,
    run_checkpoint,
    run_clone,
    run_memory_snapshot,
    run_pause,
    run_profile,
    run_resume,
    run_retry,
    run_update,
)
from orchestrator.runs.lifecycle.attempts import (
    ATTEMPT_REQUESTS,
    NewAttempt,
    attempt_create,
    attempt_exited,
    attempt_launching,
    attempt_node_exited,
    attempt_place,
    attempt_progress,
    attempt_request_sent,
    attempt_running,
    attempts_create,
    attempts_dispatched,
    attempts_enqueue,
    share_advance,
)
from orchestrator.runs.lifecycle.lineage import fork_problems, run_fork, run_rewind
from orchestrator.runs.lifecycle.retry_budgets import NODE_LOST, RUN_STOPPED
from orchestrator.runs.models import Artifact, Checkpoint, Run, RunEvent
from orchestrator.runs.submission.preview import spec_preview, spec_problem_list
from orchestrator.runs.submission.run_paths import in_run_folder
from orchestrator.runs.submission.script_secrets import renew as script_secrets_renew
from orchestrator.runs.submission.served_adapters import adapter_load, adapter_unload
from orchestrator.runs.submission.submit import run_folder, run_submit
from workers.contracts.specs.train import CheckpointSpec

__all__ = [
    "ATTEMPT_REQUESTS",
    "NODE_LOST",
    "RUN_STOPPED",
    "NewAttempt",
    "NewEvent",
    "adapter_load",
    "adapter_unload",
    "artifact_record",
    "attempt_create",
    "attempt_exited",
    "attempt_launching",
    "attempt_node_exited",
    "attempt_place",
    "attempt_progress",
    "attempt_request_sent",
    "attempt_running",
    "attempts_create",
    "attempts_dispatched",
    "attempts_enqueue",
    "checkpoint_deleted",
    "checkpoint_record",
    "event_record",
    "events_record",
    "experiment_create",
    "experiment_update",
    "external_finish",
    "fork_problems",
    "in_run_folder",
    "may_edit_experiment",
    "may_manage",
    "run_cancel",
    "run_checkpoint",
    "run_clone",
    "run_fork",
    "run_memory_snapshot",
    "run_pause",
    "run_profile",
    "run_resume",
    "run_retry",
    "run_rewind",
    "run_submit",
    "run_update",
    "script_secrets_renew",
    "share_advance",
    "spec_preview",
    "spec_problem_list",
    "summary_update",
    "wait_reasons_set",
]


def event_record(
    *,
    run: Run,
    type: str,
    data: dict[str, Any],
    attempt: int | None = None,
    rank: int | None = None,
    time: datetime | float | None = None,
    origin: str | None = None,
) -> RunEvent | None:
    """Record one event; None if its `origin` is known.

    `attempt` is a number; `time` may be Unix seconds.
    """
    if isinstance(time, int | float):
        time = clock.from_unix(time)
    rows = events_record(
        run=run,
        events=[
            NewEvent(type=type, data=data, attempt=attempt, rank=rank, time=time, origin=origin)
        ],
    )
    return rows[0] if rows else None


def events_record(*, run: Run, events: Sequence[NewEvent]) -> list[RunEvent]:
    """Record the events with a new `origin` in one transaction; returns their rows."""
    return _record(run=run, new=events) if events else []


_record = events.record  # a parameter above has the name `events`


def checkpoint_record(
    *, run: Run, attempt: int, step: int, path: str, tokens: int = 0, bytes: int = 0
) -> Checkpoint | None:
    """Record a checkpoint on disk; None if it is known.

    A checkpoint that is saved again after its deletion is new.
    """
    known = Checkpoint.objects.filter(run=run, attempt=attempt, step=step)
    values = {"path": path, "tokens": tokens, "bytes": bytes}
    with transaction.atomic():
        new = conditional.update(
            known.exclude(deleted=None), deleted=None, copy=None, created=clock.now(), **values
        )
        if not new:
            _, new = Checkpoint.objects.get_or_create(
                run=run, attempt=attempt, step=step, defaults={**values, "created": clock.now()}
            )
        if new:
            _prune_checkpoints(run)
    return known.get() if new else None


def checkpoint_deleted(*, run: Run, step: int) -> int:
    """Mark the checkpoint of this step as deleted from disk; returns the number of rows.

    Forks have their own rows.
    """
    return Checkpoint.objects.filter(run=run, step=step, deleted=None).update(deleted=clock.now())


def _prune_checkpoints(run: Run) -> None:
    """Mark checkpoints as deleted that training deletes: all but the newest `keep`."""
    if run.kind != "train":
        return
    settings = (run.spec.get("train") or {}).get("checkpoint")
    keep = CheckpointSpec.from_dict(settings or {}).keep
    # including the one that a fork starts from
    in_own_folder = Q(attempt__gt=0) | Q(path__startswith=f"{run_folder(run)}/")
    own = Checkpoint.objects.filter(in_own_folder, run=run, deleted=None)
    for step in own.order_by("-step").values_list("step", flat=True).distinct()[keep:]:
        checkpoint_deleted(run=run, step=step)


def artifact_record(*, run: Run, name: str, path: str, bytes: int = 0) -> Artifact:
    """Record a file that the run produced; replaces an older one of the same name."""
    values = {"path": path, "bytes": bytes, "created": clock.now(), "copy": None}
    return Artifact.objects.update_or_create(run=run, name=name, defaults=values)[0]


def summary_update(
    *, run: Run, summary: dict[str, Any] | None, seen: datetime, progressed: bool = True
) -> None:
    """Store the newest summary from telemetry, if any, and the time of the newest report.

    `progressed`: the report has more than the use of the machine.
    """
    values: dict[str, Any] = {} if summary is None else {"summary": summary}
    if progressed:
        values["last_progress"] = seen
    Run.objects.filter(pk=run.pk).update(last_seen=seen, **values)


def wait_reasons_set(*, reasons: Mapping[int, str]) -> int:
    """Store why each waiting run waits, by run id.

    Writes changed reasons only, with one query per distinct reason, publishes one `queue` frame,
    returns the number of changes.
    """
    texts = {run: reason[:300] for run, reason in reasons.items()}
    with transaction.atomic():
        # every service locks runs by ascending id
        waiting = (
            Run.objects.select_for_update(no_key=True)
            .filter(state="queued", pk__in=list(texts))
            .order_by("pk")
        )
        changed: dict[str, list[int]] = {}
        for pk, reason in waiting.values_list("pk", "wait_reason"):
            if reason != texts[pk]:
                changed.setdefault(texts[pk], []).append(pk)
        for text, runs in changed.items():
            Run.objects.filter(pk__in=runs).update(wait_reason=text)
        if changed:
            live.append("fleet", "queue", {})
    return sum(len(runs) for runs in changed.values())
