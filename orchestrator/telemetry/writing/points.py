"""Stores new points in their writer's tail and moves them into chunks once there are 256.

Runs inside the caller's transaction with the runs locked. Does not depend on streams, envelopes or
live frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from django.db import connection

from orchestrator.telemetry.models import Cursor, Tail
from orchestrator.telemetry.packing import ranges
from orchestrator.telemetry.packing.chunks import (
    CHUNK,
    Block,
    join_blocks,
    missing,
    pack_block,
    select,
    unpack_block,
)
from orchestrator.telemetry.writing.compact import compact
from orchestrator.telemetry.writing.cursors import Writer, cursors_save, get_cursors, parse_ranges
from orchestrator.telemetry.writing.name_limits import admit_names
from workers.contracts.wire.points import encode_number

# points; a row with fewer is extended in place, so a writer's tail has few rows
TAIL_ROW: Final = 32

_EXTEND = "UPDATE telemetry_tail SET count = %s, data = %s WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Stored:
    """One writer's new points; all numbers up to `complete_to` have arrived."""

    writer: Writer
    new: Block
    known: int  # points that had arrived before
    complete_to: int
    latest: dict[str, tuple[int, float | str]]  # metric → newest (step, value)
    first: bool  # no earlier points of this writer
    dropped_names: tuple[str, ...] = ()  # new metrics above the run's limit


def points_write(
    incoming: Iterable[tuple[Writer, Block]],
    lost: Iterable[tuple[Writer, tuple[int, int]]] = (),
) -> list[Stored]:
    """Store points that have not arrived before; one or two rows per writer for all metrics.

    `lost` has first and last of numbers that will never arrive.
    """
    gaps: dict[Writer, list[tuple[int, int]]] = {}
    for writer, ends in lost:
        gaps.setdefault(writer, []).append(ends)
    blocks: dict[Writer, list[Block]] = {}
    for writer, block in incoming:
        blocks.setdefault(writer, []).append(block)
    cursors = get_cursors(blocks.keys(), "points")
    joined = {writer: join_blocks(parts) for writer, parts in blocks.items()}
    joined, dropped = admit_names(joined, cursors)
    excess = {item.writer: item.names for item in dropped}
    stored: list[Stored] = []
    for writer in sorted(joined):
        item = _select_new(writer, cursors[writer], joined[writer], gaps.get(writer, ()))
        stored.append(replace(item, dropped_names=excess.get(writer, ())))
    fresh = [(item, cursors[item.writer]) for item in stored if len(item.new)]
    long = [(item, cursor) for item, cursor in fresh if cursor.tail_points + len(item.new) >= CHUNK]
    _append(
        [(item.new, cursor) for item, cursor in fresh if cursor.tail_points + len(item.new) < CHUNK]
    )
    _move_to_chunks(long)
    cursors_save([cursor for _, cursor in fresh])
    return stored


def _select_new(
    writer: Writer, cursor: Cursor, block: Block, lost: Iterable[tuple[int, int]]
) -> Stored:
    """Select the points that are not known yet and record them in the cursor."""
    known = parse_ranges(cursor)
    first = not known
    new = ranges.unknown(known, block.seq)
    latest: dict[str, tuple[int, float | str]] = json.loads(cursor.latest)
    new_points = block if new.all() else select(block, new)
    if len(new_points):
        known = ranges.cover(ranges.add(known, new_points.seq), lost)
        _record_latest(latest, new_points)
        cursor.ranges = json.dumps(known, separators=(",", ":"))
        cursor.latest = json.dumps(latest, separators=(",", ":"))
        cursor.last_seq = max(cursor.last_seq, int(new_points.seq.max()))
        cursor.last_step = max(cursor.last_step, int(new_points.step.max()))
        cursor.last_time = max(cursor.last_time, float(new_points.time.max()))
    return Stored(
        writer, new_points, len(block) - len(new_points), ranges.complete_to(known), latest, first
    )


def _record_latest(latest: dict[str, tuple[int, float | str]], block: Block) -> None:
    """Each metric's value at its highest step."""
    order = np.argsort(block.step, kind="stable")
    steps = block.step[order]
    absent = missing(block.values[:, order])
    newest = absent.shape[1] - 1 - (~absent)[:, ::-1].argmax(axis=1)
    values = block.values[np.arange(len(block.names)), order[newest]].tolist()
    never: list[bool] = np.all(absent, axis=1).tolist()
    for name, value, step, is_absent in zip(
        block.names, values, steps[newest].tolist(), never, strict=True
    ):
        if not is_absent and (name not in latest or latest[name][0] <= step):
            latest[name] = (step, encode_number(value))


def _append(tails: list[tuple[Block, Cursor]]) -> None:
    """Append to each writer's open tail row, or to a new row."""
    if not tails:
        return
    rows = Tail.objects.filter(cursor_id__in=[cursor.id for _, cursor in tails], count__lt=TAIL_ROW)
    open_rows = {row.cursor_id: row for row in rows}
    extended: list[tuple[Any, ...]] = []
    new = []
    for block, cursor in tails:
        cursor.tail_points += len(block)
        if row := open_rows.get(cursor.id):
            joined = join_blocks([unpack_block(row.data), block])
            extended.append((len(joined), pack_block(joined), row.id))
        else:
            new.append(Tail(cursor_id=cursor.id, count=len(block), data=pack_block(block)))
    Tail.objects.bulk_create(new)
    if extended:
        with connection.cursor() as sql:
            sql.executemany(_EXTEND, extended)


def _move_to_chunks(long: list[tuple[Stored, Cursor]]) -> None:
    """Move multiples of 256 points into chunks; the rest becomes one tail row."""
    if not long:
        return
    tails: dict[int, list[Block]] = {cursor.id: [] for _, cursor in long}
    for cursor_id, data in (
        Tail.objects.filter(cursor_id__in=tails).order_by("id").values_list("cursor_id", "data")
    ):
        tails[cursor_id].append(unpack_block(data))
    Tail.objects.filter(cursor_id__in=tails).delete()
    full, rest = [], []
    for item, cursor in long:
        block = join_blocks([*tails[cursor.id], item.new])
        split = len(block) - len(block) % CHUNK
        full.append((item.writer, select(block, slice(0, split))))
        cursor.tail_points = len(block) - split
        if cursor.tail_points:
            remaining = select(block, slice(split, None))
            rest.append(Tail(cursor_id=cursor.id, count=len(remaining), data=pack_block(remaining)))
    Tail.objects.bulk_create(rest)
    compact(full)
