"""Writes run events once each, numbered per run, and tells live topics. Does not know what an event
means.

The run's row is locked while its events are numbered (PostgreSQL; SQLite has one writer anyway):
locks are taken in the
order run, topic of the run, topic of the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Max

from orchestrator.common import clock, live
from orchestrator.runs import serializers
from orchestrator.runs.models import Run, RunEvent
from workers.contracts.wire.points import plain

# told on the run's page only: `state` frames say the first, and the others come with single steps
_NOT_FOR_EVERYBODY = frozenset(
    {
        "state_changed",
        "loss_scale_changed",
        "overflow_skipped_step",
        "plan_resolved",
        "pipeline_timeline",
        "samples_written",
    }
)


@dataclass(frozen=True)
class New:
    """An event to record.

    With an `origin` it came from outside, and comes in once, however often it is told.
    """

    type: str
    data: dict[str, Any] = field(default_factory=dict)
    attempt: int | None = None
    rank: int | None = None
    time: datetime | None = None
    origin: str | None = None


def record(*, run: Run, new: Sequence[New]) -> list[RunEvent]:
    """Records those that are not known yet, in the order given; returns them."""
    now = clock.now()
    with transaction.atomic():
        lock(run.pk)
        origins = [item.origin for item in new if item.origin is not None]
        known = _known(run, origins) if origins else set()
        seq = RunEvent.objects.filter(run=run).aggregate(top=Max("seq"))["top"] or 0
        rows = []
        for item in new:
            if item.origin is not None and item.origin in known:
                continue
            known.add(item.origin)
            seq += 1
            rows.append(
                RunEvent(
                    run=run,
                    seq=seq,
                    attempt=item.attempt,
                    rank=item.rank,
                    time=item.time or now,
                    type=item.type,
                    data=plain(item.data),
                    origin=item.origin,
                )
            )
        if rows:
            RunEvent.objects.bulk_create(rows)
            if origins:
                Run.objects.filter(pk=run.pk).update(last_seen=now)
            live.append_many(_frames(run, rows))
    return rows


def _known(run: Run, origins: list[str]) -> set[str | None]:
    return set(
        RunEvent.objects.filter(run=run, origin__in=origins).values_list("origin", flat=True)
    )


def lock(run_id: int) -> None:
    """Holds the run's row until the transaction ends. Take it before rows of its attempts."""
    list(Run.objects.select_for_update(no_key=True).filter(pk=run_id).values_list("pk"))


def _frames(run: Run, rows: list[RunEvent]) -> list[live.New]:
    told = [(row, serializers.event_answer(row)) for row in rows]
    own = [live.New(f"run:{run.pk}", "event", {"event": answer}) for _, answer in told]
    everybody = [
        live.New("fleet", "event", {"run": str(run.pk), "event": answer})
        for row, answer in told
        if row.type not in _NOT_FOR_EVERYBODY
    ]
    return own + everybody
