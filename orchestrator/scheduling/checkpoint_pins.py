"""Pins the checkpoint of a waiting fork: the nodes that store it keep it under a second name.

The order is repeated until the fork starts and is idempotent. Does not depend on how nodes store
files.
"""

from __future__ import annotations

from django.conf import settings
from django.db.models import F

from orchestrator.runs.models import Attempt, Checkpoint, Run
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.reports.missing_attempts import presence
from workers.contracts.wire.node_messages import RunState

REPEAT_S = 20.0
_EXISTING_FIRST = F("deleted").asc(nulls_first=True)


def fork_checkpoint(run: Run) -> tuple[Checkpoint, Checkpoint] | None:
    """A fork's own checkpoint row and the parent's row; None for other runs or without a parent."""
    if run.forked_from_id is None:
        return None
    own = Checkpoint.objects.filter(run=run, attempt=0).first()
    if own is None:
        return None
    source = (
        Checkpoint.objects.filter(run_id=run.forked_from_id, step=own.step)
        .order_by(_EXISTING_FIRST, "-id")
        .first()
    )
    return (own, source) if source is not None and source.path != own.path else None


def checkpoint_writer(run: Run, *, step: int) -> Attempt | None:
    """The attempt that saved the checkpoint of this step; for a fork it may be an ancestor's."""
    for _ in range(100):  # generations
        saved = (
            Checkpoint.objects.filter(run=run, step=step)
            .order_by(_EXISTING_FIRST, "-attempt", "-id")
            .first()
        )
        if saved is None or saved.attempt > 0 or run.forked_from is None:
            break
        run = run.forked_from
    if saved is None:
        return None
    return Attempt.objects.filter(run=run, number=saved.attempt).first()


def pin_for_forks() -> None:
    """Send due orders for the queued forks that have not started."""
    waiting = Run.objects.filter(
        state=RunState.QUEUED, forked_from__isnull=False, attempt_number=0
    ).defer("spec", "plan", "prediction")
    for run in waiting:
        if not presence.due(f"fork {run.pk}", "keep", REPEAT_S):
            continue
        checkpoint = fork_checkpoint(run)
        writer = checkpoint_writer(run, step=checkpoint[0].step) if checkpoint else None
        if checkpoint is None or writer is None:
            continue
        nodes = [share["node"] for share in writer.placement]
        own, source = checkpoint
        dispatch.pin_checkpoint(
            nodes[:1] if settings.ENV.shared_runs else nodes,
            source=source.path,
            target=own.path,
            owner=run.owner,
        )
