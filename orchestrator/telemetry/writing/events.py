"""Stores ranks' events in the run's history, each once and in order, and records checkpoints.

Runs inside the caller's transaction with the runs locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from orchestrator.common.clock import from_unix
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry.packing import ranges
from orchestrator.telemetry.writing.cursors import Writer, cursors_save, get_cursors, parse_ranges
from orchestrator.telemetry.writing.measured_peaks import peak_apply
from workers.contracts.wire.event_bodies import (
    INVALID,
    CheckpointSaved,
    body_problem,
    size_problem,
)
from workers.contracts.wire.points import RunEvent


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """Counts of new and known events; all numbers up to `complete_to` have arrived."""

    writer: Writer
    new: int
    known: int
    complete_to: int


def events_write(
    runs_by_id: dict[int, Run],
    incoming: Iterable[tuple[Writer, list[RunEvent]]],
    lost: Iterable[tuple[Writer, tuple[int, int]]] = (),
) -> list[StoredEvents]:
    """Record the events that have not arrived before.

    `lost` has first and last of numbers that will never arrive.
    """
    gaps: dict[Writer, list[tuple[int, int]]] = {}
    for writer, ends in lost:
        gaps.setdefault(writer, []).append(ends)
    parts: dict[Writer, list[RunEvent]] = {}
    for writer, events in incoming:
        parts.setdefault(writer, []).extend(events)
    cursors = get_cursors(parts.keys(), "events")
    stored, changed = [], []
    for writer in sorted(parts):
        cursor, events = cursors[writer], sorted(parts[writer], key=lambda event: event.seq)
        known = parse_ranges(cursor)
        seqs = np.array([event.seq for event in events], np.int64)
        fresh = ranges.unknown(known, seqs)
        for i in np.flatnonzero(fresh):
            _record(runs_by_id[writer.run_id], writer, events[i])
        if fresh.any():
            known = ranges.cover(ranges.add(known, seqs[fresh]), gaps.get(writer, ()))
            cursor.ranges = json.dumps(known, separators=(",", ":"))
            cursor.last_seq = max(cursor.last_seq, int(seqs.max()))
            changed.append(cursor)
        new = int(fresh.sum())
        stored.append(StoredEvents(writer, new, len(events) - new, ranges.complete_to(known)))
    cursors_save(changed)
    return stored


def _record(run: Run, writer: Writer, event: RunEvent) -> None:
    type_, data = event.type, event.data
    if (too_large := size_problem(data)) is not None:
        type_, data = INVALID, {"type": event.type, "problem": too_large}
    problem = body_problem(event.type, event.data) if type_ != INVALID else None
    if problem is not None:  # the history has it, and the run's page says what is wrong
        type_, data = INVALID, {"type": event.type, "problem": problem, "data": event.data}
    recorded = runs.event_record(
        run=run,
        type=type_,
        data=data,
        attempt=writer.attempt,
        rank=event.rank,
        time=from_unix(event.time),
        origin=f"{writer.attempt}/{writer.rank}/{event.seq}",
    )
    if recorded is not None and type_ == "peak_measured":
        peak_apply(run=run, attempt=writer.attempt, data=data)
    if recorded is None or type_ != "checkpoint_saved":
        return
    saved = CheckpointSaved.from_dict(data)
    if saved.step is not None and saved.path:
        runs.checkpoint_record(
            run=run,
            attempt=writer.attempt,
            step=saved.step,
            tokens=saved.tokens or 0,
            path=saved.path,
            bytes=saved.bytes or 0,
        )
