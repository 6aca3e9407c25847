"""Files of trials in their folder: the order from the supervisor, the state for it.

Pydantic and the standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import quantiles
from typing import Final

from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.wire.maintenance.plan_trials import TrialResult, TrialsOrder, TrialsState
from workers.runtime.exit_codes import UserError, write_atomically
from workers.training.trials.policy import Record

ORDER: Final = "trials.json"
STATE: Final = "state.json"


def read_order(directory: Path) -> tuple[TrialsOrder, float]:
    """The order, and when the supervisor wrote it (Unix seconds). Raises UserError."""
    path = directory / ORDER
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return TrialsOrder.from_dict(document), float(document.get("began") or 0.0)
    except (OSError, ValueError) as error:
        message = f"the order of trials {path} cannot be read: {error}"
        raise UserError(message) from None


def write_state(directory: Path, state: TrialsState) -> None:
    """Replace the state file. Raises OSError."""
    write_atomically(directory / STATE, state.to_json())


def plans_of(order: TrialsOrder) -> dict[int, ParallelPlan]:
    """The plans by index."""
    return {each.index: ParallelPlan.from_dict(each.plan) for each in order.candidates}


def result_of(
    record: Record, *, peak_bytes: float | None, seconds: float, message: str = ""
) -> TrialResult:
    """The result of a measured plan after its newest trial; `seconds` of all its trials."""
    low = high = record.step_s
    if len(record.seconds) > 1:
        low, _, high = quantiles(record.seconds, n=4, method="inclusive")
    return TrialResult(
        index=record.index,
        state="slower" if record.slower else "measured",
        step_time_s=record.step_s,
        low_s=low,
        high_s=high,
        steps=len(record.seconds),
        visits=record.visits,
        peak_bytes=peak_bytes,
        seconds=seconds,
        message=message,
    )
