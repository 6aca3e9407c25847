"""What a tick's points say to live pages: one `points` frame a run and rank, and the run's headline
numbers.

Only the lowest rank that has a metric is sent, as charts draw it; the other ranks are read on
demand.
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
from orchestrator.telemetry.packing.chunks import CHUNK, Block, curve_of, select
from orchestrator.telemetry.packing.reduce import reduce
from orchestrator.telemetry.writing.store import Stored

_MANY: Final = 2048  # steps of one rank in one tick: an import or a long backlog, told in outline
_OUTLINE: Final = 512  # points a metric
_REMEMBERED: Final = 1000  # attempts

HEADLINE: Final = (
    "loss",
    "val_loss",
    "tokens_per_s",
    "mfu",
    "tflops_per_device",
    "inference/tokens_per_s",
    "inference/ttft_s",
    "inference/tpot_s",
    "inference/running",
    "inference/waiting",
    "inference/answered",
)


class Owners:
    """Which rank speaks for which metric of an attempt: the lowest that has it.

    Remembered by one ingest process.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], dict[str, int]] = OrderedDict()

    def names(self, item: Stored) -> list[str]:
        """The metrics of these points that their writer speaks for.

        A rank above 0 that is heard for the first time, and before rank 0, does not yet: rank 0 is
        on its way.
        """
        run_id, attempt, rank = item.writer
        owners = self._of(run_id, attempt)
        if rank and item.first and 0 not in owners.values():
            return []
        for name in item.new.names:
            if rank < owners.get(name, rank + 1):
                owners[name] = rank
        return [name for name in item.new.names if owners[name] == rank]

    def _of(self, run_id: int, attempt: int) -> dict[str, int]:
        key = (run_id, attempt)
        if key not in self._known:
            self._known[key] = _stored_owners(run_id, attempt)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _stored_owners(run_id: int, attempt: int) -> dict[str, int]:
    """From earlier ticks: ranks whose first points come with this one are not asked yet."""
    found: dict[str, int] = {}
    rows = Cursor.objects.filter(run_id=run_id, attempt=attempt, stream="points", rank=0)
    for latest in rows.values_list("latest", flat=True):
        found.update(dict.fromkeys(json.loads(latest), 0))
    return found


def points_frames(stored: Collection[Stored], owners: Owners) -> list[live.New]:
    """Frames for the runs' topics, by run, attempt and rank."""
    frames = []
    for item in sorted(stored, key=lambda item: item.writer):
        names = owners.names(item) if len(item.new) else []
        if not names:
            continue
        outline = len(item.new) > _MANY
        size = len(item.new) if outline else CHUNK
        for start in range(0, len(item.new), size):
            part = select(item.new, slice(start, start + size))
            frames.append(
                live.New(f"run:{item.writer.run_id}", "points", _body(item, part, names, outline))
            )
    return frames


def _body(item: Stored, block: Block, names: list[str], outline: bool) -> dict[str, Any]:
    values = {}
    for name in names:
        curve = curve_of(block, name).sorted()
        steps, y = curve.step.tolist(), curve.y.tolist()
        if outline:
            reduced = reduce(curve.step.astype(np.float64), curve.y, _OUTLINE)
            steps, y = reduced.x.astype(np.int64).tolist(), reduced.y.tolist()
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
    if outline:
        body["reduced"] = True
    return body


def summary_of(run: Run, stored: Collection[Stored]) -> dict[str, Any] | None:
    """The run's headline numbers, from its newest attempt's lowest rank among these; None where
    nothing is new.
    """
    fresh = [item for item in stored if len(item.new) and item.writer.attempt >= run.attempt_number]
    if not fresh:
        return None
    item = min(fresh, key=lambda item: (-item.writer.attempt, item.writer.rank))
    step, tokens = int(item.new.step.max()), int(item.new.axes[2].max())
    # a benchmark's are those of all its variants, counted when it was submitted
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
