"""The checkpoints of a run from which forks, rewinds and attempts can continue."""

from __future__ import annotations

from django.db.models import F, Q, QuerySet

from orchestrator.runs.models import Checkpoint, Run
from orchestrator.runs.store import access


def resumable(*, run: Run) -> QuerySet[Checkpoint]:
    """Checkpoints on disk or in the store, newest step first; of a step, those on disk first."""
    rows = Checkpoint.objects.filter(run=run).select_related("copy")
    there = Q(deleted=None)
    if access.configured():
        there |= Q(copy__isnull=False, copy__deleted=None)
    return rows.filter(there).order_by("-step", F("deleted").asc(nulls_first=True), "-id")
