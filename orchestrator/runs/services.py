"""Writes experiments, runs and what belongs to them. Moves are in `states`, what people do in
`actions`,
what attempts tell in `attempts`, the way in in `submit`; this is the door to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q

from orchestrator.common import clock, conditional, live
from orchestrator.runs import events
from orchestrator.runs.events import New as NewEvent
from orchestrator.runs.experiments import experiment_create, experiment_update
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
    WISHES,
    attempt_create,
    attempt_dispatched,
    attempt_exited,
    attempt_launching,
    attempt_node_exited,
    attempt_running,
    attempt_wish_sent,
)
from orchestrator.runs.lifecycle.lineage import fork_problems, run_fork, run_rewind
from orchestrator.runs.models import Artifact, Checkpoint, Run, RunEvent
from orchestrator.runs.submission.submit import (
    run_folder,
    run_submit,
    spec_forecast,
    spec_problem_list,
)
from workers.contracts.specs.run_bodies import CheckpointSpec

__all__ = [
    "WISHES",
    "NewEvent",
    "artifact_record",
    "attempt_create",
    "attempt_dispatched",
    "attempt_exited",
    "attempt_launching",
    "attempt_node_exited",
    "attempt_running",
    "attempt_wish_sent",
    "checkpoint_deleted",
    "checkpoint_record",
    "event_record",
    "events_record",
    "experiment_create",
    "experiment_update",
    "external_finish",
    "fork_problems",
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
    "spec_forecast",
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
    """Records one event; None when its `origin` is known already.

    `attempt` is a number, `time` may be Unix seconds.
    """
    if isinstance(time, int | float):
        time = clock.from_unix(time)
    found = events_record(
        run=run,
        events=[
            NewEvent(type=type, data=data, attempt=attempt, rank=rank, time=time, origin=origin)
        ],
    )
    return found[0] if found else None


def events_record(*, run: Run, events: Sequence[NewEvent]) -> list[RunEvent]:
    """Records those that are not known yet, in one transaction; returns them, numbered."""
    return _record(run=run, new=events) if events else []


_record = events.record  # `events` names the argument above


def checkpoint_record(
    *, run: Run, attempt: int, step: int, path: str, tokens: int = 0, bytes: int = 0
) -> Checkpoint | None:
    """Notes a checkpoint that lies on disk; None when it is known.

    One saved again over a deleted one counts again.
    """
    known = Checkpoint.objects.filter(run=run, attempt=attempt, step=step)
    values = {"path": path, "tokens": tokens, "bytes": bytes}
    with transaction.atomic():
        new = conditional.move(
            known.exclude(deleted=None), deleted=None, created=clock.now(), **values
        )
        if not new:
            _, new = Checkpoint.objects.get_or_create(
                run=run, attempt=attempt, step=step, defaults={**values, "created": clock.now()}
            )
        if new:
            _let_go(run)
    return known.get() if new else None


def checkpoint_deleted(*, run: Run, step: int) -> int:
    """Notes that the checkpoint of this step is gone from disk; returns the rows.

    Forks of it have their own.
    """
    return Checkpoint.objects.filter(run=run, step=step, deleted=None).update(deleted=clock.now())


def _let_go(run: Run) -> None:
    """Training keeps the newest few checkpoints of a run on disk and deletes the others as it
    saves; so do the rows.
    """
    if run.kind != "train":
        return
    asked = (run.spec.get("train") or {}).get("checkpoint")
    keep = CheckpointSpec.from_dict(asked or {}).keep
    # and the one that a fork began with
    kept = Q(attempt__gt=0) | Q(path__startswith=f"{run_folder(run)}/")
    own = Checkpoint.objects.filter(kept, run=run, deleted=None)
    for step in own.order_by("-step").values_list("step", flat=True).distinct()[keep:]:
        checkpoint_deleted(run=run, step=step)


def artifact_record(*, run: Run, name: str, path: str, bytes: int = 0) -> Artifact:
    """A file that the run left behind; a newer one of the same name takes its place."""
    values = {"path": path, "bytes": bytes, "created": clock.now()}
    return Artifact.objects.update_or_create(run=run, name=name, defaults=values)[0]


def summary_update(*, run: Run, summary: dict[str, Any] | None, seen: datetime) -> None:
    """The newest headline numbers from telemetry, where there are new ones, and that the run was
    heard of.
    """
    values = {} if summary is None else {"summary": summary}
    Run.objects.filter(pk=run.pk).update(last_seen=seen, **values)


def wait_reasons_set(*, reasons: Mapping[int, str]) -> int:
    """Why each waiting run waits, by its id.

    Writes what changed, tells the fleet once, returns how many changed.
    """
    waiting = Run.objects.filter(state="queued", pk__in=list(reasons)).order_by("pk")
    changed = [
        pk for pk, reason in waiting.values_list("pk", "wait_reason") if reason != reasons[pk][:300]
    ]
    if not changed:
        return 0
    with transaction.atomic():
        for pk in changed:  # in the order of ids, as every service locks runs
            conditional.move(
                Run.objects.filter(pk=pk, state="queued"), wait_reason=reasons[pk][:300]
            )
        live.append("fleet", "queue", {})
    return len(changed)
