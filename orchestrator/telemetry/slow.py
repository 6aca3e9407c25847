"""A training well below its predicted speed: an event with its likeliest causes, while it runs,
once an attempt.

Knows the parts that the engine splits a step's time into, and those of the prediction; no formula
of either.
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
ENOUGH: Final = 20  # logged steps behind the first ones
_NEWEST: Final = 400  # points that are looked at
_WORTH: Final = 0.05  # of a step's time: less is no cause


class Cause(NamedTuple):
    """`excess_s` is what it costs of each step beyond what the prediction has for it."""

    cause: str
    excess_s: float
    message: str


def slow_tell(*, run: Run, attempt: int) -> bool | None:
    """Writes the `slow` event where it is due; None while too few steps are logged to say."""
    predicted = (run.prediction or {}).get("tokens_per_s")
    if not predicted:
        return False
    rates = _lately(run, attempt, "tokens_per_s")
    if len(rates) < ENOUGH:
        return None
    speed = median(rates)
    if speed >= SLOW * predicted:
        return False
    causes = [each._asdict() for each in _likeliest(run, attempt)]
    data = {
        "metric": "tokens_per_s",
        "predicted": predicted,
        "measured": speed,
        "ratio": speed / predicted,
        "causes": causes,
    }
    event = runs.NewEvent(type="slow", data=data, attempt=attempt, origin=f"slow/{attempt}")
    return bool(runs.events_record(run=run, events=[event]))


def _likeliest(run: Run, attempt: int) -> list[Cause]:
    """By what they cost, most first; what remains of the difference is computation itself."""
    document = run.prediction or {}
    step_s = _median(run, attempt, "step_time_s")
    found = sorted(_causes(run, attempt, step_s), key=lambda each: -each.excess_s)
    found = [each for each in found if each.excess_s > _WORTH * step_s]
    rest = (
        step_s - float(document.get("step_time_s") or step_s) - sum(each.excess_s for each in found)
    )
    if rest > _WORTH * step_s:
        message = (
            "Computation itself takes longer than predicted: a shared or throttled device, or "
            "one not calibrated."
        )
        place = sum(each.excess_s > rest for each in found)
        found.insert(place, Cause("compute", rest, message))
    return found


def _causes(run: Run, attempt: int, step_s: float) -> Iterator[Cause]:
    told = (run.prediction or {}).get("time") or {}

    def share(seconds: float) -> str:
        return f"{seconds / step_s:.0%} of a step"

    data_s = _median(run, attempt, "time/data_s")
    yield Cause(
        "data", data_s, f"Training waits for its data {share(data_s)}; prepare it beforehand."
    )
    bubble = _median(run, attempt, "pipeline/bubble_fraction")
    planned = float((run.prediction or {}).get("bubble_fraction") or 0.0)
    bubble_s = max(0.0, bubble - planned) * step_s if bubble else 0.0
    yield Cause(
        "bubble",
        bubble_s,
        f"Pipeline ranks idle for {bubble:.0%} of the time, {planned:.0%} was predicted.",
    )
    late_s = _latest(run, attempt, "comm/arrival_skew_s")
    exposed_s = _median(run, attempt, "comm/exposed_s")
    # waits for a late rank, and those in a bubble, are no network's fault
    exposed_s -= float(told.get("exposed_comm_s") or 0.0) + late_s + bubble * step_s
    last = (
        RunEvent.objects.filter(run=run, attempt=attempt, type="straggler").order_by("-seq").first()
    )
    who = f"rank {last.data.get('rank')}" if last else "one rank"
    yield Cause(
        "straggler", late_s, f"The others wait for {who} {share(late_s)}; look at its node."
    )
    message = (
        f"Waits for communication that nothing hides take {share(max(exposed_s, 0.0))} more "
        "than predicted."
    )
    yield Cause("exposed communication", exposed_s, message)
    update_s = _median(run, attempt, "time/optimizer_s") - float(told.get("optimizer_s") or 0.0)
    yield Cause(
        "optimizer", update_s, f"The update takes {share(max(update_s, 0.0))} more than predicted."
    )
    if (run.plan or {}).get("recompute", "none") != "none":
        # a backward pass costs two forward passes, with all of the forward pass again three
        forward_s, backward_s = (
            _median(run, attempt, "time/forward_s"),
            _median(run, attempt, "time/backward_s"),
        )
        again_s = backward_s - 3.0 * forward_s
        message = (
            f"Recomputation makes the backward pass {backward_s / max(forward_s, 1e-9):.1f} "
            "times the forward pass."
        )
        yield Cause("recompute", again_s, message)


def _median(run: Run, attempt: int, name: str) -> float:
    found = _lately(run, attempt, name)
    return median(found) if found else 0.0


def _lately(run: Run, attempt: int, name: str) -> list[float]:
    """The newest points without the attempt's first steps, which allocate, compile and load."""
    found = series(run=run, name=name, attempt=attempt, points=_NEWEST)
    rows = list(zip(found.x, found.y, strict=True))
    first = rows[0][0] if rows else 0
    return [y for step, y in rows if step >= first + WARM_UP and y == y]


def _latest(run: Run, attempt: int, name: str) -> float:
    """The largest of all ranks' newest values."""
    rows = Cursor.objects.filter(run=run, attempt=attempt, stream="points").values_list(
        "latest", flat=True
    )
    values = [json.loads(row).get(name, (0, 0.0))[1] for row in rows]
    return max((float(each) for each in values if isinstance(each, int | float)), default=0.0)
