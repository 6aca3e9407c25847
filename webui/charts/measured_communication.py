"""What a rank handed to each kind of collective in its newest step, beside what the planner
expects. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from webui.planner.charts.communication import CALLS
from webui.presentation import formatting

_FAR: Final = 0.10


@dataclass(frozen=True, slots=True)
class Call:
    """`measured_at` and `predicted_at` in per cent of the largest of all rows."""

    word: str
    what: str
    measured: str
    predicted: str
    measured_at: float
    predicted_at: float
    off: str
    mood: str


@dataclass(frozen=True, slots=True)
class Calls:
    rows: list[Call]
    summary: str
    foreseen: bool


def calls(latest: Mapping[str, float], collectives: Mapping[str, Any] | None) -> Calls | None:
    """Kinds with traffic, measured or predicted; None before anything is measured."""
    seen = {name: formatting.number(latest.get(f"comm/{name}")) for name, _, _ in CALLS}
    if all(value is None for value in seen.values()):
        return None
    foreseen = {name: formatting.number((collectives or {}).get(name)) for name, _, _ in CALLS}
    most = max(
        [value for values in (seen, foreseen) for value in values.values() if value] or [1.0]
    )
    rows = []
    for name, word, what in CALLS:
        measured, predicted = seen[name], foreseen[name]
        if not measured and not predicted:
            continue
        share = measured / predicted - 1 if measured is not None and predicted else None
        rows.append(
            Call(
                word,
                what,
                _size(measured),
                _size(predicted) if collectives else formatting.DASH,
                round(100 * (measured or 0.0) / most, 2),
                round(100 * (predicted or 0.0) / most, 2),
                "" if share is None else f"{share:+.1%}".replace("-", "−"),
                "" if share is None or abs(share) <= _FAR else "warn",
            )
        )
    return Calls(rows, _summary(rows, latest, bool(collectives)), bool(collectives))


def _summary(rows: list[Call], latest: Mapping[str, float], foreseen: bool) -> str:
    if not rows:
        return "The rank sent nothing in its newest step."
    total, exposed, step = (
        formatting.number(latest.get(name))
        for name in ("comm/bytes", "comm/exposed_s", "step_time_s")
    )
    says = (
        f"{formatting.memory(total)} in the newest step"
        if total
        else "What the newest step handed over"
    )
    if exposed is not None and step:
        says += (
            f"; {formatting.seconds(exposed)} of it was not hidden, "
            f"{formatting.percent(exposed / step)} of the step"
        )
    if not foreseen:
        return f"{says}. The planner does not count this plan's collectives."
    far = [row.word for row in rows if row.mood]
    return f"{says}. " + (
        f"Not as predicted: {formatting.listed(far)}." if far else "All kinds are as predicted."
    )


def _size(value: float | None) -> str:
    return formatting.DASH if value is None else formatting.memory(value) if value else "none"
