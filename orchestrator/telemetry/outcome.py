"""Comparison of a training run's measurements with its prediction.

Reads curves and memory of one attempt. A miss becomes one event per attempt and metric. Does not
depend on the planner's formulas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.runs.outputs.benchmark_table import benchmark_lines
from orchestrator.runs.plan_trials.table import trial_lines
from orchestrator.runs.submission.prediction.whole_run import without_restarts
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.selectors import series
from workers.contracts import RunSpec
from workers.contracts.catalog.metrics import metric_unit

MISS: Final = 0.10  # of the prediction
ROLLOUTS: Final = ("generation_s", "sync_s")  # phases of an iteration
WARM_UP: Final = 5  # first steps of an attempt, which allocate, compile and load
ENOUGH: Final = 10  # logged steps after the warm-up that a median requires
EARLY: Final = 30  # steps after which a running attempt is compared for the first time
_NEWEST: Final = 400  # steps that the medians cover
_SMALL: Final = 2**20  # bytes; smaller differences in memory are not a miss


@dataclass(frozen=True)
class Measured:
    """Medians over the attempt's newest steps after the warm-up; memory of the fullest rank."""

    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    bubble_fraction: float | None
    memory: dict[str, float]
    steps: int
    rollouts: dict[str, float] = field(default_factory=dict)  # seconds by phase of an iteration


@dataclass(frozen=True)
class Comparison:
    """One predicted number and the measured one."""

    metric: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    @property
    def missed(self) -> bool:
        """Whether the ratio differs from 1 by more than `MISS`."""
        small = self.metric.startswith("memory/") and abs(self.measured - self.predicted) < _SMALL
        return abs(self.ratio - 1) > MISS and not small

    def to_dict(self) -> dict[str, Any]:
        """Data for pages and events."""
        return {
            "metric": self.metric,
            "unit": metric_unit(self.metric),
            "predicted": self.predicted,
            "measured": self.measured,
            "ratio": self.ratio,
            "missed": self.missed,
        }


def measured(*, run: Run, attempt: int | None = None) -> Measured | None:
    """Measure an attempt (default: the newest); None while it has too few steps for a median."""
    number = run.attempt_number if attempt is None else attempt
    rows = list(
        Cursor.objects.filter(run=run, attempt=number, stream="points").values_list(
            "rank", "last_step", "latest"
        )
    )
    if not rows:
        return None
    last = max(step for _, step, _ in rows)

    def newest(name: str) -> list[float]:
        curve = series(run=run, name=name, attempt=number, points=5000, from_=last - _NEWEST)
        first = curve.x[0] if curve.x and curve.total_points < _NEWEST else 0
        return [
            y
            for step, y in zip(curve.x, curve.y, strict=True)
            if step >= first + WARM_UP and y == y and y > 0
        ]

    times = newest("step_time_s")
    if len(times) < ENOUGH:
        return None
    rates, mfus, bubbles = newest("tokens_per_s"), newest("mfu"), newest("pipeline/bubble_fraction")
    return Measured(
        step_time_s=median(times),
        tokens_per_s=median(rates) if rates else 0.0,
        mfu=median(mfus) if mfus else None,
        bubble_fraction=median(bubbles) if bubbles else None,
        memory=_memory(json.loads(latest) for _, _, latest in rows),
        steps=len(times),
        rollouts={name: median(each) for name in ROLLOUTS if (each := newest(name))},
    )


def comparisons(*, run: Run, attempt: int | None = None) -> list[Comparison]:
    """Predicted vs measured time, throughput, MFU, bubbles and memory, if both are known."""
    prediction, actual = prediction_at(run=run, attempt=attempt), measured(run=run, attempt=attempt)
    return list(_compare(prediction, actual)) if prediction and actual else []


def prediction_at(*, run: Run, attempt: int | None = None) -> dict[str, Any] | None:
    """The prediction for the size of an attempt (default: the newest) of an elastic run.

    For a smaller size it has step time, throughput and memory only.
    """
    prediction: dict[str, Any] | None = run.prediction
    size = size_of(run=run, attempt=attempt)
    if prediction is None or size is None or size["devices"] == run.devices:
        return prediction
    shared = {name: prediction.get(name) for name in ("device", "fits", "calibration")}
    step_time_s, full = size["step_time_s"], prediction.get("step_time_s")
    if not step_time_s or not full:
        return shared
    rate = float(prediction.get("tokens_per_s") or 0.0) * float(full) / float(step_time_s)
    memory = {**(prediction.get("memory") or {}), "total_bytes": size["total_bytes"]}
    return {**shared, "step_time_s": step_time_s, "tokens_per_s": rate, "memory": memory}


def size_of(*, run: Run, attempt: int | None = None) -> dict[str, Any] | None:
    """The entry of `run.sizes` of an attempt (default: the newest); None for a fixed size."""
    if not run.sizes:
        return None
    number = run.attempt_number if attempt is None else attempt
    row = run.attempts.filter(number=number).first()
    if row is None:
        return None
    return next((size for size in run.sizes if size["devices"] == row.devices), None)


def misses_record(*, run: Run, attempt: int, exit_class: str = "") -> int:
    """Record `prediction_missed` for each number off by more than a tenth; returns the new ones."""
    # a benchmark's steps belong to many plans, its prediction to one
    if not run.prediction or run.kind == "benchmark":
        return 0
    misses: list[dict[str, Any]] = [
        {
            "metric": item.metric,
            "predicted": item.predicted,
            "measured": item.measured,
            "ratio": item.ratio,
        }
        for item in comparisons(run=run, attempt=attempt)
        if item.missed and item.metric != "mfu"
    ]
    if exit_class == "out_of_memory" and run.prediction.get("fits"):
        memory = run.prediction["memory"]
        misses.append(
            {
                "metric": "fits",
                "predicted": memory["total_bytes"],
                "measured": memory["capacity_bytes"],
                "ratio": None,
                "out_of_memory": True,
            }
        )
    calibration = run.prediction.get("calibration")
    events = [
        runs.NewEvent(
            type="prediction_missed",
            data={**data, "calibration": calibration},
            attempt=attempt,
            origin=f"prediction/{attempt}/{data['metric']}",
        )
        for data in misses
    ]
    return len(runs.events_record(run=run, events=events))


def measurement_lines(*, run: Run) -> list[dict[str, Any]] | str:
    """The run's calibration measurements, one per variant of a benchmark, or why it has none.

    With those of the plans that were tried before the run.
    """
    if run.kind == "benchmark" and run.ended is not None:
        return benchmark_lines(run=run)
    line = measurement_line(run=run)
    tried = trial_lines(run=run) if run.ended is not None else []
    if isinstance(line, str):
        return tried or line
    return [*(each for each in tried if each["plan"] != line["plan"]), line]


def measurement_line(*, run: Run) -> dict[str, Any] | str:
    """The run as a measurement line for calibration, or a message why it is not usable."""
    prediction = run.prediction
    if run.kind not in ("train", "benchmark") or not prediction or run.plan is None:
        return f"run {run.pk} has no prediction to compare with"
    if run.ended is None:
        return f"run {run.pk} is {run.state}; wait until it has ended"
    size = size_of(run=run)
    if size is not None and size["devices"] != run.devices:
        return f"run {run.pk} ended on {size['devices']} of its {run.devices} devices"
    spec = RunSpec.from_dict(run.spec)
    assert spec.train is not None and spec.shape is not None
    line = {
        "id": f"run-{run.pk}",
        "model": spec.shape.to_dict(),
        "plan": run.plan,
        "cluster": prediction["cluster"],
        "workload": {"seq_len": spec.train.seq_len},
        "framework": prediction["framework"],
        "source": f"run {run.pk}",
    }
    if (run.exit or {}).get("class") == "out_of_memory":
        return {**line, "measured": {"out_of_memory": True}}
    actual = measured(run=run)
    if actual is None:
        return f"run {run.pk} logged fewer than {WARM_UP + ENOUGH} steps"
    numbers: dict[str, Any] = {"step_time_s": actual.step_time_s}
    if "memory/allocated_bytes" in actual.memory:
        numbers["peak_bytes"] = actual.memory["memory/allocated_bytes"]
    return {**line, "measured": numbers}


def _compare(prediction: dict[str, Any], actual: Measured) -> Iterator[Comparison]:
    pairs: list[tuple[str, Any, float | None]] = [
        ("step_time_s", prediction.get("step_time_s"), actual.step_time_s),
        ("tokens_per_s", prediction.get("tokens_per_s"), actual.tokens_per_s),
        ("mfu", prediction.get("mfu"), actual.mfu),
        ("pipeline/bubble_fraction", prediction.get("bubble_fraction"), actual.bubble_fraction),
    ]
    for name, seconds in (prediction.get("rollouts") or {}).items():
        pairs.append((name, seconds, actual.rollouts.get(name)))
    # predicted and measured are both the largest of all ranks
    for part, size in (prediction.get("largest_bytes") or {}).items():
        pairs.append((f"memory/{part}_bytes", size, actual.memory.get(f"memory/{part}_bytes")))
    memory = prediction.get("memory") or {}
    # predictions for a CPU of version 0.1 leave out the process, which the measured number holds
    if prediction.get("device") != "cpu" or memory.get("unattributed_bytes"):
        allocated = "memory/allocated_bytes"
        pairs.append((allocated, memory.get("total_bytes"), actual.memory.get(allocated)))
    # only runs of one attempt have a measured total
    whole = without_restarts(prediction.get("whole_run") or {})
    ended = prediction.get("measured") or {}
    pairs.append(("wall_clock_s", whole.get("total_s"), ended.get("total_s")))
    for metric, predicted, value in pairs:
        if predicted and value:
            yield Comparison(metric, float(predicted), float(value))


def _memory(latest: Iterator[dict[str, Any]]) -> dict[str, float]:
    """The largest of all ranks' newest values, by metric."""
    largest: dict[str, float] = {}
    for values in latest:
        for name, (_, value) in values.items():
            if name.startswith("memory/") and isinstance(value, int | float):
                largest[name] = max(largest.get(name, 0.0), float(value))
    return largest
