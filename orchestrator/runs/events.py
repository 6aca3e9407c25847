"""Records run events once each, numbered per run, and publishes their live frames.

The run's row is locked while its events are numbered (PostgreSQL; SQLite has one writer). Lock
order: run, the run's topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Max

from orchestrator.common import clock, live
from orchestrator.runs import serializers
from orchestrator.runs.models import Run, RunEvent
from workers.contracts.wire.points import plain

# not published on `fleet`: `state` frames replace the first, the others occur at single steps
_RUN_TOPIC_ONLY = frozenset(
    {
        "state_changed",
        "loss_scale_changed",
        "overflow_skipped_step",
        "plan_resolved",
        "pipeline_timeline",
        "rollouts_sampled",
        "samples_written",
        "training_rows",
    }
)


@dataclass(frozen=True)
class NewEvent:
    """An event to record. One with an `origin` is recorded once, however often it is reported."""

    type: str
    data: dict[str, Any] = field(default_factory=dict)
    attempt: int | None = None
    rank: int | None = None
    time: datetime | None = None
    origin: str | None = None


def record(*, run: Run, new: Sequence[NewEvent]) -> list[RunEvent]:
    """Record the events whose `origin` is new, in order; returns their rows."""
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
                Run.objects.filter(pk=run.pk).update(last_seen=now, last_progress=now)
            live.append_many(_frames(run, rows))
    return rows


def record_each(new: Mapping[int, NewEvent]) -> list[live.NewFrame]:
    """Record one event without `origin` for each run, by id, in three queries.

    The caller has locked the runs in its transaction. Returns the frames of the runs' topics, in
    the order of `new`, which the caller appends.
    """
    now = clock.now()
    tops = dict(
        RunEvent.objects.filter(run__in=list(new)).values_list("run").annotate(top=Max("seq"))
    )
    rows = [
        RunEvent(
            run_id=run,
            seq=tops.get(run, 0) + 1,
            attempt=item.attempt,
            rank=item.rank,
            time=item.time or now,
            type=item.type,
            data=plain(item.data),
        )
        for run, item in new.items()
    ]
    RunEvent.objects.bulk_create(rows)
    return [
        live.NewFrame(f"run:{row.run_id}", "event", {"event": serializers.serialize_event(row)})
        for row in rows
    ]


def _known(run: Run, origins: list[str]) -> set[str | None]:
    return set(
        RunEvent.objects.filter(run=run, origin__in=origins).values_list("origin", flat=True)
    )


def lock(run_id: int) -> None:
    """Lock the run's row until the transaction ends. Lock it before rows of its attempts."""
    list(Run.objects.select_for_update(no_key=True).filter(pk=run_id).values_list("pk"))


def _frames(run: Run, rows: list[RunEvent]) -> list[live.NewFrame]:
    serialized = [(row, serializers.serialize_event(row)) for row in rows]
    own = [live.NewFrame(f"run:{run.pk}", "event", {"event": data}) for _, data in serialized]
    fleet = [
        live.NewFrame(
            "fleet",
            "event",
            {**live.owned_by(run.owner_id), "run": str(run.pk), "event": data},
        )
        for row, data in serialized
        if row.type not in _RUN_TOPIC_ONLY
    ]
    return own + fleet
