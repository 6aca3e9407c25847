"""Writing telemetry: points and logs of one run (as the API calls it), and everything of one ingest
tick at once.

Each call is one transaction, idempotent by the writers' own numbers. Does not know Redis streams or
envelopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction

from orchestrator.common import clock, live
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry.packing.chunks import Block, block_of
from orchestrator.telemetry.retention import retain
from orchestrator.telemetry.writing.cursors import Writer, lock_runs
from orchestrator.telemetry.writing.events import StoredEvents, events_write
from orchestrator.telemetry.writing.lines import Lines, StoredLines, lines_write, log_frames
from orchestrator.telemetry.writing.news import Owners, points_frames, summary_of
from orchestrator.telemetry.writing.store import Stored, points_write
from workers.contracts.wire.points import PointBatch, RunEvent

__all__ = [
    "Kept",
    "Lines",
    "News",
    "Stored",
    "StoredEvents",
    "StoredLines",
    "logs_store",
    "news_store",
    "points_store",
    "progress_tell",
    "retain",
]

_owners = Owners()


@dataclass(slots=True)
class News:
    """What has come in, by writer; a writer may stand there several times."""

    points: list[tuple[Writer, Block]] = field(default_factory=list)
    events: list[tuple[Writer, list[RunEvent]]] = field(default_factory=list)
    lines: list[tuple[Writer, Lines]] = field(default_factory=list)

    def run_ids(self) -> set[int]:
        return {writer.run_id for writer, _ in (*self.points, *self.events, *self.lines)}


@dataclass(slots=True)
class Kept:
    """What became of it; `summaries` are the runs' new headline numbers."""

    points: list[Stored]
    events: list[StoredEvents]
    lines: list[StoredLines]
    summaries: dict[int, dict[str, Any]]


def points_store(*, run: Run, attempt: int, batches: Sequence[PointBatch]) -> list[Stored]:
    """Stores and publishes the points that are new; one answer a rank, ascending."""
    return news_store(
        News(points=[(Writer(run.id, attempt, batch.rank), block_of(batch)) for batch in batches])
    ).points


def logs_store(
    *, run: Run, attempt: int, batches: Sequence[tuple[int, Lines]]
) -> list[StoredLines]:
    """Stores and publishes the lines `(rank, Lines)` that are new; one answer a rank, ascending."""
    return news_store(
        News(lines=[(Writer(run.id, attempt, rank), lines) for rank, lines in batches])
    ).lines


def news_store(news: News, *, progress_of: set[int] | None = None) -> Kept:
    """All of it in one transaction with its live frames; news of runs that are gone is left out.

    `progress_of` names the runs whose headline numbers are also told on the `fleet` topic, all when
    None.
    """
    with transaction.atomic():
        # order of locks, the same in every service: runs by id, their topics, `fleet` last
        found = lock_runs(news.run_ids())
        events = events_write(found, [item for item in news.events if item[0].run_id in found])
        points = points_write(item for item in news.points if item[0].run_id in found)
        lines = lines_write(item for item in news.lines if item[0].run_id in found)
        summaries = _summaries(found, points)
        frames = [*points_frames(points, _owners), *log_frames(lines)]
        frames.sort(key=lambda frame: int(frame.topic.partition(":")[2]))
        for run_id, summary in sorted(summaries.items()):
            if progress_of is None or run_id in progress_of:
                frames.append(_progress(run_id, summary))
        live.append_many(frames)
    return Kept(points, events, lines, summaries)


def progress_tell(summaries: dict[int, dict[str, Any]]) -> None:
    """Headline numbers on the `fleet` topic that `news_store` was told to hold back."""
    live.append_many([_progress(run_id, summary) for run_id, summary in summaries.items()])


def _progress(run_id: int, summary: dict[str, Any]) -> live.New:
    return live.New("fleet", "progress", {"run": str(run_id), "summary": summary})


def _summaries(found: dict[int, Run], points: list[Stored]) -> dict[int, dict[str, Any]]:
    by_run: dict[int, list[Stored]] = {}
    for item in points:
        by_run.setdefault(item.writer.run_id, []).append(item)
    now = clock.now()
    summaries = {}
    for run_id, run in sorted(found.items()):
        summary = summary_of(run, by_run.get(run_id, ()))
        runs.summary_update(run=run, summary=summary, seen=now)
        if summary is not None:
            summaries[run_id] = summary
    return summaries
