"""Detects training below its predicted speed and records the likeliest causes.

Records once per attempt. Reads how the engine and the prediction split a step's time, but does not
depend on how either is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Final, NamedTuple

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run, RunEvent
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.outcome import WARM_UP
from orchestrator.telemetry.selectors import series

SLOW: Final = 0.8  # of the predicted tokens/s
ENOUGH: Final = 20  # logged steps after the warm-up
_NEWEST: Final = 400  # points
_MIN_SHARE: Final = 0.05  # of a step's time; smaller excesses are not causes


class Cause(NamedTuple):
    """`excess_s` is the time per step beyond the prediction."""

    cause: str
    excess_s: float
    message: str


def slowdown_record(*, run: Run, attempt: int) -> bool | None:
    """Record the event `slow` if the run is slow; None while too few steps are logged to judge."""
    predicted = (run.prediction or {}).get("tokens_per_s")
    if not predicted:
        return False
    rates = _newest(run, attempt, "tokens_per_s")
    if len(rates) < ENOUGH:
        return None
    speed = median(rates)
    if speed >= SLOW * predicted:
        return False
    data = {
        "metric": "tokens_per_s",
        "predicted": predicted,
        "measured": speed,
        "ratio": speed / predicted,
        "causes": [cause._asdict() for cause in _ranked_causes(run, attempt)],
    }
    event = runs.NewEvent(type="slow", data=data, attempt=attempt, origin=f"slow/{attempt}")
    return bool(runs.events_record(run=run, events=[event]))


def _ranked_causes(run: Run, attempt: int) -> list[Cause]:
    """Causes by descending excess; the remaining difference counts as computation."""
    step_s = _median(run, attempt, "step_time_s")
    predicted_s = float((run.prediction or {}).get("step_time_s") or step_s)
    causes = sorted(_causes(run, attempt, step_s), key=lambda cause: -cause.excess_s)
    causes = [cause for cause in causes if cause.excess_s > _MIN_SHARE * step_s]
    rest = step_s - predicted_s - sum(cause.excess_s for cause in causes)
    if rest > _MIN_SHARE * step_s:
        message = (
            "Computation takes longer than predicted: the device may be shared, throttled or not "
            "calibrated."
        )
        position = sum(cause.excess_s > rest for cause in causes)
        causes.insert(position, Cause("compute", rest, message))
    return causes


def _causes(run: Run, attempt: int, step_s: float) -> Iterator[Cause]:
    prediction = run.prediction or {}
    time = prediction.get("time") or {}

    def share(seconds: float) -> str:
        return f"{seconds / step_s:.0%} of a step"

    data_s = _median(run, attempt, "time/data_s")
    message = f"Training waits for data for {share(data_s)}; prepare the data in advance."
    yield Cause("data", data_s, message)
    bubble = _median(run, attempt, "pipeline/bubble_fraction")
    planned = float(prediction.get("bubble_fraction") or 0.0)
    bubble_s = max(0.0, bubble - planned) * step_s if bubble else 0.0
    message = f"Pipeline ranks idle for {bubble:.0%} of the time; the prediction was {planned:.0%}."
    yield Cause("bubble", bubble_s, message)
    late_s = _largest(run, attempt, "comm/arrival_skew_s")
    message = f"Other ranks wait {share(late_s)} for {_straggler(run, attempt)}; check its node."
    yield Cause("straggler", late_s, message)
    # waits for a late rank and waits in a bubble are not caused by the network
    predicted_s = float(time.get("exposed_comm_s") or 0.0)
    exposed_s = _median(run, attempt, "comm/exposed_s") - (predicted_s + late_s + bubble * step_s)
    message = f"Exposed communication takes {share(max(exposed_s, 0.0))} more than predicted."
    yield Cause("exposed communication", exposed_s, message)
    update_s = _median(run, attempt, "time/optimizer_s") - float(time.get("optimizer_s") or 0.0)
    message = f"The optimizer update takes {share(max(update_s, 0.0))} more than predicted."
    yield Cause("optimizer", update_s, message)
    if (run.plan or {}).get("recompute", "none") != "none":
        # a backward pass costs two forward passes; with full recomputation, three
        forward_s = _median(run, attempt, "time/forward_s")
        backward_s = _median(run, attempt, "time/backward_s")
        ratio = backward_s / max(forward_s, 1e-9)
        message = f"Recomputation makes the backward pass {ratio:.1f} times the forward pass."
        yield Cause("recompute", backward_s - 3.0 * forward_s, message)


def _straggler(run: Run, attempt: int) -> str:
    events = RunEvent.objects.filter(run=run, attempt=attempt, type="straggler")
    last = events.order_by("-seq").first()
    return f"rank {last.data.get('rank')}" if last else "one rank"


def _median(run: Run, attempt: int, name: str) -> float:
    values = _newest(run, attempt, name)
    return median(values) if values else 0.0


def _newest(run: Run, attempt: int, name: str) -> list[float]:
    """The newest values after the attempt's warm-up."""
    curve = series(run=run, name=name, attempt=attempt, points=_NEWEST)
    first = curve.x[0] if curve.x else 0
    points = zip(curve.x, curve.y, strict=True)
    return [y for step, y in points if step >= first + WARM_UP and y == y]


def _largest(run: Run, attempt: int, name: str) -> float:
    """The largest of all ranks' newest values."""
    rows = Cursor.objects.filter(run=run, attempt=attempt, stream="points").values_list(
        "latest", flat=True
    )
    values = [json.loads(row).get(name, (0, 0.0))[1] for row in rows]
    return max((float(value) for value in values if isinstance(value, int | float)), default=0.0)
