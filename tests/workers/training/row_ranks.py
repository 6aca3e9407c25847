"""Runs on rows that a test makes, without files: the same on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.workers.training.pool import Result, ended_process_group
from workers.contracts.specs.plan import ParallelPlan
from workers.runtime.environment import read_environment
from workers.runtime.spec_loading import parse_spec
from workers.training.data.rows import Row, Segment
from workers.training.setup import attempt
from workers.training.setup.spec_loading import TrainingRun


class HandMade:
    """A `RowSource` of given rows, in order, epoch after epoch."""

    def __init__(self, rows: list[Row], *, names: list[str] | None = None) -> None:
        self.rows, self.windows = rows, len(rows)
        self.seq_len = len(rows[0].weights)
        self.names = names or ["rows"]
        self.masked, self.uniform = True, False

    def source(self, index: int) -> int:
        return index % len(self.names)

    def row(self, index: int) -> Row:
        return self.rows[index % len(self.rows)]


def as_json(row: Row) -> dict[str, Any]:
    segments = [[s.start, s.stop, s.pair, s.role, s.margin] for s in row.segments]
    return {
        "ids": row.ids.tolist(),
        "weights": row.weights.tolist(),
        "starts": row.starts,
        "segments": segments,
    }


def from_json(row: dict[str, Any]) -> Row:
    return Row(
        np.array(row["ids"], dtype=np.int64),
        np.array(row["weights"], dtype=np.float32),
        tuple(row["starts"]),
        tuple(Segment(*each) for each in row["segments"]),
    )


def train_rows(
    spec: dict[str, Any], directory: str, rows: list[dict[str, Any]], names: list[str] | None = None
) -> dict[str, Any]:
    """Train `spec` on rows; the outcome. Validates on the same rows."""
    parsed = parse_spec(spec)
    assert parsed.trained_shape is not None and isinstance(parsed.plan, ParallelPlan)
    assert parsed.train is not None
    run = TrainingRun(parsed, parsed.trained_shape, parsed.plan, parsed.train)
    source = HandMade([from_json(row) for row in rows], names=names)
    held_out = source if parsed.train.eval else None
    opened = attempt.open_samples
    attempt.open_samples = lambda *_, **__: (source, held_out)  # type: ignore[assignment,misc]
    try:
        outcome = attempt.run_attempt(run, read_environment(Path(directory)))
    finally:
        attempt.open_samples = opened
    return {"class": outcome.exit_class, "reason": outcome.reason, "step": outcome.step}


def run_rows(
    pools: Any, spec: dict[str, Any], directory: Path, rows: list[Row], **more: Any
) -> Result:
    """`train_rows` on as many ranks as the plan has."""
    plan = ParallelPlan.model_validate(spec["plan"])
    given = {"spec": spec, "directory": str(directory), "rows": [as_json(row) for row in rows]}
    given = json.loads(json.dumps({**given, **more}))
    if plan.world_size == 1:
        with ended_process_group():
            return Result([train_rows(**given)], directory)
    call = "tests.workers.training.row_ranks:train_rows"
    return Result(pools(plan.world_size).call(call, **given), directory)
