"""What a training run measured, in the planner's words, and where it missed its prediction.

Reads curves and memory of one attempt; knows no formula. A miss becomes an event, once an attempt
and metric.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.runs.outputs.benchmark_table import benchmark_lines
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.selectors import series
from workers.contracts import RunSpec
from workers.contracts.catalog.metrics import metric_unit

MISS: Final = 0.10  # of the prediction
WARM_UP: Final = 5  # first steps of an attempt, which allocate, compile and load
ENOUGH: Final = 10  # logged steps behind them that a median is taken of
EARLY: Final = 30  # steps after which a running attempt is judged for the first time
_LONG: Final = 400  # newest steps that are looked at
_SMALL: Final = 2**20  # bytes that nobody plans with


@dataclass(frozen=True)
class Measured:
    """Medians over the attempt's newest steps without its first ones; memory of the rank that holds
    most.
    """

    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    bubble_fraction: float | None
    memory: dict[str, float]
    steps: int


@dataclass(frozen=True)
class Comparison:
    """One predicted number beside the measured one; `ratio` is measured over predicted."""

    metric: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def missed(self) -> bool:
        small = self.metric.startswith("memory/") and abs(self.measured - self.predicted) < _SMALL
        return abs(self.ratio - 1) > MISS and not small

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "unit": metric_unit(self.metric),
            "predicted": self.predicted,
            "measured": self.measured,
            "ratio": self.ratio,
            "missed": self.missed,
        }


def measured(*, run: Run, attempt: int | None = None) -> Measured | None:
    """None while the attempt (default: the newest) has logged too few steps for a median."""
    number = run.attempt_number if attempt is None else attempt
    rows = list(
        Cursor.objects.filter(run=run, attempt=number, stream="points").values_list(
            "rank", "last_step", "latest"
        )
    )
    if not rows:
        return None
    last = max(step for _, step, _ in rows)

    def lately(name: str) -> list[float]:
        found = series(run=run, name=name, attempt=number, points=5000, from_=last - _LONG)
        first = found.x[0] if found.x and found.total_points < _LONG else 0
        return [
            y
            for step, y in zip(found.x, found.y, strict=True)
            if step >= first + WARM_UP and y == y and y > 0
        ]

    times = lately("step_time_s")
    if len(times) < ENOUGH:
        return None
    rates, shares = lately("tokens_per_s"), lately("mfu")
    return Measured(
        step_time_s=median(times),
        tokens_per_s=median(rates) if rates else 0.0,
        mfu=median(shares) if shares else None,
        bubble_fraction=median(bubbles)
        if (bubbles := lately("pipeline/bubble_fraction"))
        else None,
        memory=_memory(json.loads(latest) for _, _, latest in rows),
        steps=len(times),
    )


def comparisons(*, run: Run, attempt: int | None = None) -> list[Comparison]:
    """Predicted beside measured, where both are known: time, throughput, MFU, bubbles, memory by
    category.
    """
    document, found = run.prediction, measured(run=run, attempt=attempt)
    return list(_compared(document, found)) if document and found else []


def misses_tell(*, run: Run, attempt: int, exit_class: str = "") -> int:
    """Writes a `prediction_missed` event for each number that is more than a tenth off; returns how
    many are new.
    """
    # whose steps are of many plans, the prediction is of one
    if not run.prediction or run.kind == "benchmark":
        return 0
    found = [
        each
        for each in comparisons(run=run, attempt=attempt)
        if each.missed and each.metric != "mfu"
    ]
    told = [
        {key: each.to_dict()[key] for key in ("metric", "predicted", "measured", "ratio")}
        for each in found
    ]
    if exit_class == "out_of_memory" and run.prediction.get("fits"):
        needs, has = (run.prediction["memory"][name] for name in ("total_bytes", "capacity_bytes"))
        told.append(
            {
                "metric": "fits",
                "predicted": needs,
                "measured": has,
                "ratio": None,
                "out_of_memory": True,
            }
        )
    calibration = run.prediction.get("calibration")
    new = [
        runs.NewEvent(
            type="prediction_missed",
            data={**data, "calibration": calibration},
            attempt=attempt,
            origin=f"prediction/{attempt}/{data['metric']}",
        )
        for data in told
    ]
    return len(runs.events_record(run=run, events=new))


def measurement_lines(*, run: Run) -> list[dict[str, Any]] | str:
    """The run's measurement lines: one of a training run, one for each variant of a benchmark; or
    why there is none.
    """
    if run.kind == "benchmark" and run.ended is not None:
        return benchmark_lines(run=run)
    line = measurement_line(run=run)
    return line if isinstance(line, str) else [line]


def measurement_line(*, run: Run) -> dict[str, Any] | str:
    """The run as a measurement line to calibrate with, or why it is none, in a sentence."""
    document = run.prediction
    if run.kind not in ("train", "benchmark") or not document or run.plan is None:
        return f"run {run.pk} has no prediction to be measured against"
    if run.ended is None:
        return f"run {run.pk} is {run.state}; wait for its end"
    spec = RunSpec.from_dict(run.spec)
    assert spec.train is not None and spec.shape is not None
    line = {
        "id": f"run-{run.pk}",
        "model": spec.shape.to_dict(),
        "plan": run.plan,
        "cluster": document["cluster"],
        "workload": {"seq_len": spec.train.seq_len},
        "framework": document["framework"],
        "source": f"run {run.pk}",
    }
    if (run.exit or {}).get("class") == "out_of_memory":
        return {**line, "measured": {"out_of_memory": True}}
    found = measured(run=run)
    if found is None:
        return f"run {run.pk} logged fewer than {WARM_UP + ENOUGH} steps"
    numbers: dict[str, Any] = {"step_time_s": found.step_time_s}
    if document["device"] != "cpu" and "memory/allocated_bytes" in found.memory:
        numbers["peak_bytes"] = found.memory["memory/allocated_bytes"]
    return {**line, "measured": numbers}


def _compared(document: dict[str, Any], found: Measured) -> Iterator[Comparison]:
    memory = document.get("memory") or {}
    pairs: list[tuple[str, Any, float | None]] = [
        ("step_time_s", document.get("step_time_s"), found.step_time_s),
        ("tokens_per_s", document.get("tokens_per_s"), found.tokens_per_s),
        ("mfu", document.get("mfu"), found.mfu),
        ("pipeline/bubble_fraction", document.get("bubble_fraction"), found.bubble_fraction),
    ]
    # a metric's is the largest of all ranks too
    for part, size in (document.get("largest_bytes") or {}).items():
        pairs.append((f"memory/{part}_bytes", size, found.memory.get(f"memory/{part}_bytes")))
    if document.get("device") != "cpu":  # on a CPU a process holds Python and its libraries as well
        pairs.append(
            (
                "memory/allocated_bytes",
                memory.get("total_bytes"),
                found.memory.get("memory/allocated_bytes"),
            )
        )
    for metric, predicted, seen in pairs:
        if predicted and seen:
            yield Comparison(metric, float(predicted), float(seen))


def _memory(latest: Iterator[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for values in latest:
        for name, (_, value) in values.items():
            if name.startswith("memory/") and isinstance(value, int | float):
                found[name] = max(found.get(name, 0.0), float(value))
    return found
