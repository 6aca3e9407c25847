"""Stores telemetry: points and logs of one run (for the API), or everything of one ingest tick.

Each call is one transaction and idempotent by the writers' sequence numbers. Does not depend on
Redis streams or envelopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import transaction

from orchestrator.common import clock, live
from orchestrator.runs import live_frames
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry.packing.chunks import batch_to_block
from orchestrator.telemetry.writing.cursors import Writer, lock_runs
from orchestrator.telemetry.writing.events import StoredEvents, events_write
from orchestrator.telemetry.writing.frames import MetricOwners, points_frames, run_summary
from orchestrator.telemetry.writing.incoming import Incoming
from orchestrator.telemetry.writing.lines import Lines, StoredLines, lines_write, log_frames
from orchestrator.telemetry.writing.name_limits import known_names
from orchestrator.telemetry.writing.points import Stored, points_write
from orchestrator.telemetry.writing.summaries import mark_stale
from orchestrator.telemetry.writing.summaries import refresh as summaries_refresh
from workers.contracts.wire.points import MAX_NAMES_PER_RUN, PointBatch

__all__ = [
    "Incoming",
    "Lines",
    "StoreResult",
    "Stored",
    "StoredEvents",
    "StoredLines",
    "incoming_store",
    "logs_store",
    "names_after",
    "points_store",
    "progress_publish",
    "summaries_refresh",
]

_OF_MACHINE: Final = ("system/", "device/")
_owners = MetricOwners()
_NAMES_CACHED = 200  # of a request
_RUNS_CACHED = 2000
_admitted: dict[int, frozenset[str]] = {}  # the names of each run's newest request


@dataclass(slots=True)
class StoreResult:
    """What was stored; `summaries` are the runs' new headline numbers."""

    points: list[Stored]
    events: list[StoredEvents]
    lines: list[StoredLines]
    summaries: dict[int, dict[str, Any]]


def points_store(*, run: Run, attempt: int, batches: Sequence[PointBatch]) -> list[Stored]:
    """Store and publish new points; returns one result per rank, ascending."""
    points = [(Writer(run.id, attempt, batch.rank), batch_to_block(batch)) for batch in batches]
    return incoming_store(Incoming(points=points)).points


def names_after(*, run: Run, names: set[str]) -> int:
    """The number of metric names that the run would have with these.

    Only their own number if an earlier call had the same names: a run's names never decrease.
    """
    if not names or _admitted.get(run.pk) == frozenset(names):
        return len(names)
    total = len(known_names(run.pk) | names)
    if total <= MAX_NAMES_PER_RUN and len(names) <= _NAMES_CACHED:
        if len(_admitted) >= _RUNS_CACHED:
            _admitted.clear()
        _admitted[run.pk] = frozenset(names)
    return total


def logs_store(
    *, run: Run, attempt: int, batches: Sequence[tuple[int, Lines]]
) -> list[StoredLines]:
    """Store and publish new lines `(rank, Lines)`; returns one result per rank, ascending."""
    lines = [(Writer(run.id, attempt, rank), lines) for rank, lines in batches]
    return incoming_store(Incoming(lines=lines)).lines


def incoming_store(incoming: Incoming, *, publish_progress: set[int] | None = None) -> StoreResult:
    """Store everything in one transaction with its live frames; skips runs that do not exist.

    `publish_progress` limits the runs whose headline numbers go to the `fleet` topic; None means
    all.
    """
    with transaction.atomic():
        # every service locks in this order: runs by id, then their topics
        locked = lock_runs(incoming.run_ids())
        events = events_write(
            locked,
            [item for item in incoming.events if item[0].run_id in locked],
            incoming.lost_events,
        )
        points = points_write(
            (item for item in incoming.points if item[0].run_id in locked), incoming.lost_points
        )
        _record_dropped_names(locked, points)
        mark_stale(item.writer.run_id for item in points if len(item.new))
        lines = lines_write(item for item in incoming.lines if item[0].run_id in locked)
        silent = set(locked) - _progressed(incoming, points)
        summaries = _update_summaries(locked, points, silent)
        frames = [*points_frames(points, _owners), *log_frames(lines)]
        frames.sort(key=lambda frame: int(frame.topic.partition(":")[2]))
        live.append_many(frames)
        progress = [
            (locked[run_id].owner_id, run_id, summary)
            for run_id, summary in sorted(summaries.items())
            if publish_progress is None or run_id in publish_progress
        ]
        transaction.on_commit(lambda: _announce_progress(progress), robust=True)
    return StoreResult(points, events, lines, summaries)


def progress_publish(summaries: dict[int, dict[str, Any]]) -> None:
    """Publish headline numbers that `incoming_store` deferred on the `fleet` topic."""
    owners = dict(Run.objects.filter(pk__in=summaries).values_list("pk", "owner_id"))
    _announce_progress(
        [(owners[run], run, summary) for run, summary in summaries.items() if run in owners]
    )


def _record_dropped_names(locked: dict[int, Run], points: list[Stored]) -> None:
    """One event per run and attempt: metrics above the limit are missing, and which."""
    for item in points:
        if item.dropped_names:
            runs.event_record(
                run=locked[item.writer.run_id],
                type="metrics_dropped",
                data={
                    "limit": MAX_NAMES_PER_RUN,
                    "count": len(item.dropped_names),
                    "names": list(item.dropped_names[:10]),
                },
                attempt=item.writer.attempt,
                rank=item.writer.rank,
                origin=f"metrics_dropped/{item.writer.attempt}",
            )


def _announce_progress(progress: list[tuple[int, int, dict[str, Any]]]) -> None:
    """Publish `(owner, run, summary)` on `fleet`, without numbers: the next ones replace them."""
    for owner_id, run_id, summary in progress:
        live.announce("fleet", "progress", live_frames.progress(owner_id, run_id, summary))


def _progressed(incoming: Incoming, points: list[Stored]) -> set[int]:
    """The runs that reported more than the use of their machine, which a thread samples."""
    runs_ = {writer.run_id for writer, _ in (*incoming.events, *incoming.lines)}
    return runs_ | {
        item.writer.run_id
        for item in points
        if len(item.new) and not all(name.startswith(_OF_MACHINE) for name in item.new.names)
    }


def _update_summaries(
    locked: dict[int, Run], points: list[Stored], silent: set[int]
) -> dict[int, dict[str, Any]]:
    """`silent`: the runs that reported no progress."""
    by_run: dict[int, list[Stored]] = {}
    for item in points:
        by_run.setdefault(item.writer.run_id, []).append(item)
    now = clock.now()
    summaries = {}
    for run_id, run in sorted(locked.items()):
        summary = run_summary(run, by_run.get(run_id, ()))
        runs.summary_update(run=run, summary=summary, seen=now, progressed=run_id not in silent)
        if summary is not None:
            summaries[run_id] = summary
    return summaries
