"""The way of points into the database: what is new, onto its writer's tail, and on into chunks once
256 are there.

Runs inside the caller's transaction with the runs locked. Knows nothing of streams, envelopes or
live frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
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
from orchestrator.telemetry.writing.cursors import Writer, cursors_of, cursors_save, ranges_of
from workers.contracts.wire.points import encode_number

# points; a row with fewer is extended in place, so a writer's tail stays a handful of rows
TAIL_ROW: Final = 32

_EXTEND = "UPDATE telemetry_tail SET count = %s, data = %s WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of one writer's points: the new ones, how many were known, and up to where
    nothing is missing.
    """

    writer: Writer
    new: Block
    known: int
    complete_to: int
    latest: dict[str, tuple[int, float | str]]  # metric → newest (step, value)
    first: bool  # nothing had come from this writer before


def points_write(incoming: Iterable[tuple[Writer, Block]]) -> list[Stored]:
    """Stores what has not arrived before; one row or two a writer, whatever the number of metrics."""
    blocks: dict[Writer, list[Block]] = {}
    for writer, block in incoming:
        blocks.setdefault(writer, []).append(block)
    cursors = cursors_of(blocks.keys(), "points")
    stored: list[Stored] = []
    for writer in sorted(blocks):
        stored.append(_sifted(writer, cursors[writer], join_blocks(blocks[writer])))
    fresh = [(item, cursors[item.writer]) for item in stored if len(item.new)]
    long = [(item, cursor) for item, cursor in fresh if cursor.tail_points + len(item.new) >= CHUNK]
    _append(
        [(item.new, cursor) for item, cursor in fresh if cursor.tail_points + len(item.new) < CHUNK]
    )
    _move([(item, cursor) for item, cursor in long])
    cursors_save([cursor for _, cursor in fresh])
    return stored


def _sifted(writer: Writer, cursor: Cursor, block: Block) -> Stored:
    """The block without what is known; the cursor takes note of the rest."""
    known = ranges_of(cursor)
    first = not known
    new = ranges.unknown(known, block.seq)
    latest: dict[str, tuple[int, float | str]] = json.loads(cursor.latest)
    sifted = block if new.all() else select(block, new)
    if len(sifted):
        known = ranges.add(known, sifted.seq)
        _note_latest(latest, sifted)
        cursor.ranges = json.dumps(known, separators=(",", ":"))
        cursor.latest = json.dumps(latest, separators=(",", ":"))
        cursor.last_seq = max(cursor.last_seq, int(sifted.seq.max()))
        cursor.last_step = max(cursor.last_step, int(sifted.step.max()))
        cursor.last_time = max(cursor.last_time, float(sifted.time.max()))
    return Stored(
        writer, sifted, len(block) - len(sifted), ranges.complete_to(known), latest, first
    )


def _note_latest(latest: dict[str, tuple[int, float | str]], block: Block) -> None:
    """Each metric's value at its highest step."""
    order = np.argsort(block.step, kind="stable")
    steps = block.step[order]
    gone = missing(block.values[:, order])
    newest = gone.shape[1] - 1 - (~gone)[:, ::-1].argmax(axis=1)
    values = block.values[np.arange(len(block.names)), order[newest]].tolist()
    nowhere: list[bool] = np.all(gone, axis=1).tolist()
    for name, value, step, none in zip(
        block.names, values, steps[newest].tolist(), nowhere, strict=True
    ):
        if not none and (name not in latest or latest[name][0] <= step):
            latest[name] = (step, encode_number(value))


def _append(tails: list[tuple[Block, Cursor]]) -> None:
    """Onto each writer's open tail row, or into a new one."""
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


def _move(long: list[tuple[Stored, Cursor]]) -> None:
    """Whole multiples of 256 points go from tail and newcomers into chunks, the rest stays as one
    tail row.
    """
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
        cut = len(block) - len(block) % CHUNK
        full.append((item.writer, select(block, slice(0, cut))))
        cursor.tail_points = len(block) - cut
        if cursor.tail_points:
            remaining = select(block, slice(cut, None))
            rest.append(Tail(cursor_id=cursor.id, count=len(remaining), data=pack_block(remaining)))
    Tail.objects.bulk_create(rest)
    compact(full)
