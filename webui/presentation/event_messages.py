"""Describes run events in one line each, with a mark for charts and lists.

Pure functions of event data. Does not depend on how events are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from webui.presentation import (
    inference_event_texts,
    run_event_texts,
    training_event_texts,
)
from webui.presentation.event_parts import on_rank, shortened

# shown as charts and texts, so event lists leave them out
NOT_LISTED: Final = frozenset(
    {
        "pipeline_timeline",
        "rollouts_sampled",
        "samples_written",
        "training_rows",
        "plan_trials_began",
        "plan_trial_began",
        "plan_trial",
    }
)
_PLAIN: Final = frozenset(
    {
        "state_changed",
        "plan_resolved",
        "peak_measured",
        "data_statistics",
        "recompute_chosen",
        "compiled",
        "kernels_chosen",
        "weights_loaded",
        "frozen_weights_loaded",
        "value_weights_loaded",
        "benchmark_began",
        "stopped",
        "benchmark_collectives",
        "benchmark_products",
        "draining",
        "evaluation_submitted",
    }
)
_GOOD: Final = frozenset(
    {
        "plan_chosen",
        "checkpoint_saved",
        "checkpoint_restored",
        "checkpoint_stored",
        "artifact_stored",
        "checkpoint_fetched",
        "data_fetched",
        "environment_prepared",
        "rollouts_restored",
        "profile_saved",
        "memory_profile",
        "serving",
        "generated",
        "produced",
        "evaluated",
        "served",
        "quantized",
    }
)
_BAD: Final = frozenset(
    {
        "disk_full",
        "store_problem",
        "hang",
        "invalid_event",
        "metrics_dropped",
        "telemetry_dropped",
        "node_cordoned",
        "node_lost",
        "non_finite",
        "out_of_memory",
    }
)


@dataclass(frozen=True, slots=True)
class EventMessage:
    """One event as text; `kind` (plain, good, event or bad) selects its shape and color."""

    time: datetime
    type: str
    kind: str
    text: str
    step: int | None = None
    attempt: int | None = None
    rank: int | None = None
    run: int | None = None
    run_name: str = ""

    def mark(self, per_step: Mapping[str, float]) -> dict[str, Any]:
        """Return a chart marker: its place on each axis, None if the event has no step."""
        step = self.step
        placed = {
            axis: step * factor if step is not None else None for axis, factor in per_step.items()
        }
        return {
            "step": step,
            "time": self.time.timestamp(),
            **placed,
            "kind": self.kind,
            "text": self.text,
        }


def event_message(event: Any, run_name: str = "") -> EventMessage:
    """Build the message of a RunEvent row."""
    data = event.data if isinstance(event.data, dict) else {}
    step = data.get("step")
    return EventMessage(
        time=event.time,
        type=event.type,
        kind=get_kind(event.type, data),
        text=describe(event.type, data, event.rank),
        step=int(step) if isinstance(step, int | float) and not isinstance(step, bool) else None,
        attempt=event.attempt,
        rank=event.rank,
        run=event.run_id,
        run_name=run_name,
    )


def get_kind(type: str, data: Mapping[str, Any]) -> str:
    """Return plain, good, event or bad."""
    if type == "state_changed":
        return {"failed": "bad", "finished": "good"}.get(str(data.get("new")), "plain")
    if type == "rank_exited":
        return "plain" if data.get("code") == 0 else "bad"
    if type in _PLAIN or (type == "preempted" and data.get("action") == "pause"):
        return "plain"
    if type in _GOOD:
        return "good"
    return "bad" if type in _BAD else "event"


def shown_on_charts(message: EventMessage) -> bool:
    """Whether charts mark the event; plain ones appear in lists only."""
    return message.kind != "plain"


def describe(type: str, data: Mapping[str, Any], rank: int | None) -> str:
    """Describe an event in one line; unknown types show their first data items."""
    describer = _DESCRIBERS.get(type)
    if describer is not None:
        return str(describer(data, rank))
    items = ", ".join(f"{key} {shortened(value)}" for key, value in list(data.items())[:4])
    name = type.replace("_", " ")
    return f"{name[:1].upper()}{name[1:]}{on_rank(rank)}" + (f": {items}" if items else "")


_DESCRIBERS: Final = {
    **run_event_texts.DESCRIBERS,
    **training_event_texts.DESCRIBERS,
    **inference_event_texts.DESCRIBERS,
}
