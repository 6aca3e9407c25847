"""The measured time of an ended training run, by steps and the rest, next to its prediction.

Stored with the prediction when the run ends, so that pages of many runs read no curves.
"""

from __future__ import annotations

from typing import Any

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.outcome import measured, size_of
from orchestrator.telemetry.selectors import series


def measured_whole_run(*, run: Run) -> dict[str, Any] | None:
    """`{total_s, steps_s, beyond_steps_s, step_time_s, allocated_bytes}`; None without a median.

    Seconds of the only attempt from when it got its devices to its end, without the queue of an
    engine. Runs with several attempts, and those that did not end as planned, have no total.
    """
    actual = measured(run=run)
    if actual is None:
        return None
    result: dict[str, Any] = {
        "step_time_s": actual.step_time_s,
        "allocated_bytes": actual.memory.get("memory/allocated_bytes"),
    }
    attempts = list(run.attempts.all()[:2])
    if len(attempts) != 1 or attempts[0].exit_class != "ok":
        return result
    began, ended = attempts[0].held_from, attempts[0].ended
    if began is None or ended is None:
        return result
    total = (ended - began).total_seconds()
    curve = series(run=run, name="step_time_s", attempt=1, points=5000)
    times = [value for value in curve.y if value is not None and value == value]
    last = Cursor.objects.filter(run=run, attempt=1, stream="points").values_list(
        "last_step", flat=True
    )
    if not times or not last:
        return result
    steps = sum(times) / len(times) * max(last)
    return {
        **result,
        "total_s": total,
        "steps_s": steps,
        "beyond_steps_s": max(0.0, total - steps),
    }


def measurements_store(*, run: Run) -> bool:
    """Add `measured` to an ended run's prediction; False if nothing was measured."""
    if not run.prediction or run.kind != "train" or "step_time_s" not in run.prediction:
        return False
    size = size_of(run=run)
    if size is not None and size["devices"] != run.devices:
        return False  # the prediction is that of the largest size
    values = measured_whole_run(run=run)
    if values is None:
        return False
    run.prediction = {**run.prediction, "measured": values}
    run.save(update_fields=["prediction"])
    return True
