"""Limits the metric names of a run: every name is a series, a chunk and a line of the legend.

Runs inside the caller's transaction with the runs locked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.packing.chunks import Block
from orchestrator.telemetry.writing.cursors import Writer
from workers.contracts.wire.points import MAX_NAMES_PER_RUN


@dataclass(frozen=True, slots=True)
class DroppedNames:
    """New metrics of one writer that exceed the run's limit; their values are not stored."""

    writer: Writer
    names: tuple[str, ...]


def admit_names(
    blocks: Mapping[Writer, Block], cursors: Mapping[Writer, Cursor]
) -> tuple[dict[Writer, Block], list[DroppedNames]]:
    """The blocks without names above the run's limit, and what was dropped.

    Names that the run has are always admitted, also of new ranks and attempts.
    """
    admitted, dropped = dict(blocks), []
    run_names: dict[int, set[str]] = {}
    for writer in sorted(blocks):
        block = blocks[writer]
        own = json.loads(cursors[writer].latest)
        new = [name for name in block.names if name not in own]
        if not new:
            continue
        if writer.run_id not in run_names:
            run_names[writer.run_id] = known_names(writer.run_id)
        known = run_names[writer.run_id]
        unknown = [name for name in new if name not in known]
        room = max(0, MAX_NAMES_PER_RUN - len(known))
        known.update(unknown[:room])
        if excess := unknown[room:]:
            admitted[writer] = _without(block, set(excess))
            dropped.append(DroppedNames(writer, tuple(excess)))
    return admitted, dropped


def known_names(run_id: int) -> set[str]:
    """Metric names of all ranks and attempts of the run."""
    rows = Cursor.objects.filter(run_id=run_id, stream="points").values_list("latest", flat=True)
    return {name for latest in rows for name in json.loads(latest)}


def _without(block: Block, names: set[str]) -> Block:
    rows = [row for row, name in enumerate(block.names) if name not in names]
    left = tuple(block.names[row] for row in rows)
    return Block(block.axes, block.time, left, block.values[np.array(rows, np.int64)])
