"""Events as sentences, with a mark for charts and lists. Pure; knows the event types, not where they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from webui import words

_PLAIN: Final = frozenset({"state_changed", "plan_resolved", "peak_measured"})
_GOOD: Final = frozenset({"checkpoint_saved", "checkpoint_restored"})
_BAD: Final = frozenset({"non_finite", "node_lost", "out_of_memory", "hang"})


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened: `kind` plain, good, event or bad decides shape and colour."""

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
        """For a chart: places on its axes, null where the event has none."""
        at = self.step
        placed = {axis: at * factor if at is not None else None for axis, factor in per_step.items()}
        return {"step": at, "time": self.time.timestamp(), **placed, "kind": self.kind, "text": self.text}


def moment(event: Any, run_name: str = "") -> Moment:
    """From a RunEvent row."""
    data = event.data if isinstance(event.data, dict) else {}
    step = data.get("step")
    return Moment(
        time=event.time,
        type=event.type,
        kind=kind_of(event.type, data),
        text=sentence(event.type, data, event.rank),
        step=int(step) if isinstance(step, int | float) and not isinstance(step, bool) else None,
        attempt=event.attempt,
        rank=event.rank,
        run=event.run_id,
        run_name=run_name,
    )


def kind_of(type: str, data: Mapping[str, Any]) -> str:
    if type == "state_changed":
        return {"failed": "bad", "finished": "good"}.get(str(data.get("new")), "plain")
    if type == "rank_exited":
        return "plain" if data.get("code") == 0 else "bad"
    return "plain" if type in _PLAIN else "good" if type in _GOOD else "bad" if type in _BAD else "event"


def on_charts(moment: Moment) -> bool:
    """State moves and resolved plans stand in the list only."""
    return moment.kind != "plain"


def sentence(type: str, data: Mapping[str, Any], rank: int | None) -> str:
    """One sentence for an event; unknown types show their data in short."""
    teller = _TELLERS.get(type)
    if teller is not None:
        return str(teller(data, rank))
    told = ", ".join(f"{key} {_short(value)}" for key, value in list(data.items())[:4])
    name = type.replace("_", " ")
    return f"{name[:1].upper()}{name[1:]}{_on(rank)}" + (f": {told}" if told else "")


def _state(data: Mapping[str, Any], rank: int | None) -> str:
    what = "Attempt" if data.get("of") == "attempt" else "Run"
    by, why = data.get("by"), data.get("why")
    whom = f" by {by}" if by and by not in ("control plane", "node") else ""
    if why == "submitted":
        return f"Run submitted{whom}"
    cause = f": {why}" if why and why not in (data.get("new"), "cancelled", "paused", "resumed") else ""
    return f"{what} {data.get('new')}{whom}{cause}"


def _scale(data: Mapping[str, Any], rank: int | None) -> str:
    old, new = words.quantity(data.get("old")), words.quantity(data.get("new"))
    return f"Loss scale {old} → {new}{_because(data)}{_at(data)}"


def _checkpoint(data: Mapping[str, Any], rank: int | None) -> str:
    size = data.get("bytes")
    took = data.get("seconds")
    more = [words.memory(size)] * bool(size) + [f"in {words.duration(took)}"] * bool(took)
    return f"Checkpoint saved{_at(data)}" + (f" ({', '.join(more)})" if more else "")


def _exited(data: Mapping[str, Any], rank: int | None) -> str:
    how = data.get("signal") or (f"code {data['code']}" if data.get("code") is not None else "")
    name = data.get("class")
    return (
        f"Rank {rank if rank is not None else '?'} exited"
        + (f" with {how}" if how else "")
        + (f", {name}" if name else "")
        + _at(data)
    )


def _missed(data: Mapping[str, Any], rank: int | None) -> str:
    likely = data.get("likely")
    why = f"; likely {words.listed([str(item) for item in likely])}" if likely else ""
    measured, predicted = _short(data.get("measured")), _short(data.get("predicted"))
    return f"Prediction missed: {data.get('what')} {measured}, predicted {predicted}{why}"


def _non_finite(data: Mapping[str, Any], rank: int | None) -> str:
    what = data.get("what") or data.get("name") or data.get("metric") or "a value"
    return f"Not a finite number: {what}{_on(rank)}{_at(data)}"


def _at(data: Mapping[str, Any]) -> str:
    step = data.get("step")
    return f" at step {step:,}" if isinstance(step, int) else ""


def _on(rank: int | None) -> str:
    return f" on rank {rank}" if rank is not None and rank >= 0 else ""


def _because(data: Mapping[str, Any]) -> str:
    return f" after {data['reason']}" if data.get("reason") else ""


def _short(value: Any) -> str:
    if isinstance(value, float):
        return words.quantity(value)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _plainly(what: str) -> Any:
    def tell(data: Mapping[str, Any], rank: int | None) -> str:
        reason = data.get("reason") or data.get("says") or data.get("why")
        return f"{what}{_on(rank)}{_at(data)}" + (f": {_short(reason)}" if reason else "")

    return tell


def _peak(data: Mapping[str, Any], rank: int | None) -> str:
    how = " ".join(str(data[key]) for key in ("precision", "source") if data.get(key))
    return (
        f"Peak of {data.get('device', 'the device')}{_on(rank)}: {_short(data.get('tflops'))} TFLOP/s"
        + f" ({how})" * bool(how)
    )


def _node(data: Mapping[str, Any], rank: int | None) -> str:
    return f"Node {data.get('node', '')} lost: no heartbeat".replace("  ", " ")


def _plan(data: Mapping[str, Any], rank: int | None) -> str:
    plan = data.get("plan")
    return f"Plan resolved: {words.plan_sentence(plan)}" if isinstance(plan, dict) else "Plan resolved"


_TELLERS: Final[dict[str, Any]] = {
    "state_changed": _state,
    "loss_scale_changed": _scale,
    "overflow_skipped_step": _plainly("Step skipped: gradients overflowed"),
    "non_finite": _non_finite,
    "checkpoint_saved": _checkpoint,
    "checkpoint_restored": _plainly("Continued from a checkpoint"),
    "rank_exited": _exited,
    "node_lost": _node,
    "out_of_memory": _plainly("Out of memory"),
    "straggler": _plainly("Slow rank"),
    "hang": _plainly("No progress"),
    "preempted": _plainly("Preempted"),
    "plan_resolved": _plan,
    "peak_measured": _peak,
    "prediction_missed": _missed,
}
