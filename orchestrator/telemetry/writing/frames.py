"""Live frames of a tick's points, one per run and rank, and the run's headline numbers.

Sends a metric only from the lowest rank that has it, which charts draw; pages request other ranks.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from orchestrator.common import live
from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.packing.chunks import CHUNK, Block, row_curve, select
from orchestrator.telemetry.packing.reduce import reduce
from orchestrator.telemetry.writing.points import Stored

_REDUCE_ABOVE: Final = 2048  # steps of one rank in one tick: an import or a long backlog
_REDUCED: Final = 512  # points per metric
_CACHED: Final = 1000  # attempts
_MAX_NAMES: Final = 1000  # per frame; pages load further metrics when they show them

HEADLINE: Final = (
    "loss",
    "val_loss",
    "reward/mean",
    "tokens_per_s",
    "mfu",
    "tflops_per_device",
    "inference/tokens_per_s",
    "inference/ttft_s",
    "inference/tpot_s",
    "inference/score_s",
    "inference/scores_per_s",
    "inference/running",
    "inference/waiting",
    "inference/answered",
)


class MetricOwners:
    """The rank that publishes each metric of an attempt: the lowest that has it.

    Cached per ingest process.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], dict[str, int]] = OrderedDict()

    def names(self, item: Stored) -> list[str]:
        """The metrics of these points that their writer publishes.

        A rank above 0 whose first points arrive before rank 0's publishes none yet.
        """
        run_id, attempt, rank = item.writer
        owners = self._get(run_id, attempt)
        if rank and item.first and 0 not in owners.values():
            return []
        for name in item.new.names:
            if rank < owners.get(name, rank + 1):
                owners[name] = rank
        return [name for name in item.new.names if owners[name] == rank]

    def _get(self, run_id: int, attempt: int) -> dict[str, int]:
        key = (run_id, attempt)
        if key not in self._known:
            self._known[key] = _stored_owners(run_id, attempt)
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _stored_owners(run_id: int, attempt: int) -> dict[str, int]:
    """Metrics that rank 0 logged in earlier ticks."""
    owners: dict[str, int] = {}
    rows = Cursor.objects.filter(run_id=run_id, attempt=attempt, stream="points", rank=0)
    for latest in rows.values_list("latest", flat=True):
        owners.update(dict.fromkeys(json.loads(latest), 0))
    return owners


def points_frames(stored: Collection[Stored], owners: MetricOwners) -> list[live.NewFrame]:
    """`points` frames for the runs' topics, ordered by run, attempt and rank."""
    frames = []
    for item in sorted(stored, key=lambda item: item.writer):
        names = owners.names(item) if len(item.new) else []
        if not names:
            continue
        reduced = len(item.new) > _REDUCE_ABOVE
        size = len(item.new) if reduced else CHUNK
        for start in range(0, len(item.new), size):
            part = select(item.new, slice(start, start + size))
            frames.append(
                live.NewFrame(
                    f"run:{item.writer.run_id}", "points", _body(item, part, names, reduced)
                )
            )
    return frames


def _body(item: Stored, block: Block, names: list[str], reduced: bool) -> dict[str, Any]:
    values = {}
    row_of = {name: row for row, name in enumerate(block.names)}
    for name in names[:_MAX_NAMES]:
        curve = row_curve(block, row_of[name]).sorted()
        steps, y = curve.step.tolist(), curve.y.tolist()
        if reduced:
            short = reduce(curve.step.astype(np.float64), curve.y, _REDUCED)
            steps, y = short.x.astype(np.int64).tolist(), short.y.tolist()
        if steps:
            values[name] = list(zip(steps, y, strict=True))
    body: dict[str, Any] = {
        "attempt": item.writer.attempt,
        "rank": item.writer.rank,
        "values": values,
        "tokens": int(block.axes[2].max()),
        "time": float(block.time.max()),
        "last_seq": int(block.seq.max()),
    }
    if reduced:
        body["reduced"] = True
    return body


def run_summary(run: Run, stored: Collection[Stored]) -> dict[str, Any] | None:
    """The run's headline numbers, from the lowest rank of its newest attempt; None if unchanged."""
    fresh = [item for item in stored if len(item.new) and item.writer.attempt >= run.attempt_number]
    if not fresh:
        return None
    item = min(fresh, key=lambda item: (-item.writer.attempt, item.writer.rank))
    step, tokens = int(item.new.step.max()), int(item.new.axes[2].max())
    # for a benchmark: the steps of all its variants, counted at submission
    steps = ((run.spec or {}).get("train") or {}).get("steps") or (run.summary or {}).get("steps")
    summary: dict[str, Any] = {
        **(run.summary or {}),
        "attempt": item.writer.attempt,
        "step": step,
        "steps": steps,
        "tokens": tokens,
        "time": float(item.new.time.max()),
    }
    for name in HEADLINE:
        if name in item.latest:
            summary[name] = item.latest[name][1]
    step_time = item.latest.get("step_time_s", (0, "unknown"))[1]
    known = isinstance(step_time, float | int) and isinstance(steps, int)
    summary["eta_s"] = round(max((steps or 0) - step, 0) * float(step_time), 1) if known else None
    return summary
