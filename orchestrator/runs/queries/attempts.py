"""Attempts of runs, and the parts of attempts on nodes."""

from __future__ import annotations

import uuid
from collections.abc import Collection

from django.db.models import QuerySet

from orchestrator.common.units import is_id
from orchestrator.runs.models import (
    Attempt,
    AttemptShare,
    Run,
)
from workers.contracts.wire.node_messages import AttemptState


def attempts_of(*, run: Run) -> QuerySet[Attempt]:
    """The run's attempts, newest first."""
    return Attempt.objects.filter(run=run).order_by("-number")


def attempts_on(*, node: str) -> list[Attempt]:
    """Attempts that have not ended and use the node, with their runs."""
    alive = Attempt.objects.exclude(state=AttemptState.EXITED).filter(shares__node=node)
    return list(alive.select_related("run").order_by("id"))


def shares_on(nodes: Collection[str]) -> list[tuple[str, str, int, str]]:
    """`(node, fence, attempt id, state)` of the parts on these nodes that have not exited."""
    rows = AttemptShare.objects.filter(node__in=nodes).exclude(state=AttemptState.EXITED)
    values = rows.values_list("node", "attempt__fence", "attempt_id", "state")
    return [(node, str(fence), attempt, state) for node, fence, attempt, state in values]


def attempt_ended(*, fence: str) -> Attempt | None:
    """The attempt with this fence if it has ended; also None for a text that is not a fence."""
    try:
        known = uuid.UUID(fence)
    except ValueError:
        return None
    return Attempt.objects.filter(fence=known, state=AttemptState.EXITED).first()


def attempt_by_fence(*, attempt_id: int | str, fence: str) -> Attempt | None:
    """The attempt of a report, with its run; None for a stale or unknown fence."""
    if not is_id(attempt_id):
        return None
    attempt = Attempt.objects.filter(pk=int(attempt_id)).select_related("run").first()
    return attempt if attempt is not None and str(attempt.fence) == str(fence) else None


def nodes_of(*, run: Run) -> list[str]:
    """The nodes of the run's newest attempt."""
    newest = Attempt.objects.filter(run=run).order_by("-number").first()
    return [str(share["node"]) for share in newest.placement] if newest is not None else []
