"""A fork's checkpoint is kept for it while it waits: the nodes that hold it give it a second name.

Asked again until the fork starts; done twice it is done once. Does not know how files are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings
from django.db.models import F

from orchestrator.runs.models import Attempt, Checkpoint, Run
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.reports.presence import presence

REPEAT_S = 20.0
_KEPT_FIRST = F("deleted").asc(nulls_first=True)


def origin_of(run: Run) -> tuple[Checkpoint, Checkpoint] | None:
    """`(its own row, the row it was kept from)` of a fork; None for other runs, and where the
    parent is gone.
    """
    if run.forked_from_id is None:
        return None
    own = Checkpoint.objects.filter(run=run, attempt=0).first()
    if own is None:
        return None
    source = (
        Checkpoint.objects.filter(run_id=run.forked_from_id, step=own.step)
        .order_by(_KEPT_FIRST, "-id")
        .first()
    )
    return (own, source) if source is not None and source.path != own.path else None


def writer_of(run: Run, *, step: int) -> Attempt | None:
    """The attempt that saved the run's checkpoint of this step; a fork's first was its parent's, or
    an ancestor's.
    """
    for _ in range(100):  # generations
        saved = (
            Checkpoint.objects.filter(run=run, step=step)
            .order_by(_KEPT_FIRST, "-attempt", "-id")
            .first()
        )
        if saved is None or saved.attempt > 0 or run.forked_from is None:
            break
        run = run.forked_from
    if saved is None:
        return None
    return Attempt.objects.filter(run=run, number=saved.attempt).first()


def keep_for(waiting: Iterable[Run]) -> None:
    """Sends what is due for forks among these runs that have not begun."""
    for run in waiting:
        if (
            run.forked_from_id is None
            or run.attempt_number
            or not presence.due(f"fork {run.pk}", "keep", REPEAT_S)
        ):
            continue
        found = origin_of(run)
        writer = writer_of(run, step=found[0].step) if found else None
        if found is None or writer is None:
            continue
        nodes = [share["node"] for share in writer.placement]
        own, source = found
        dispatch.keep(
            nodes[:1] if settings.ENV.shared_runs else nodes, source=source.path, target=own.path
        )
