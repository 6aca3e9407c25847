"""Compares communication volume per kind of collective with the prediction. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _

from webui.planner.charts.communication import CALLS
from webui.presentation import formatting

_FAR: Final = 0.10


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of collective; `measured_at` and `predicted_at` in percent of the largest value."""

    title: str
    description: str
    measured: str
    predicted: str
    measured_at: float
    predicted_at: float
    off: str
    mood: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Rows by kind of collective; `predicted`: whether a prediction exists."""

    rows: list[Call]
    summary: str
    predicted: bool


def calls(latest: Mapping[str, float], collectives: Mapping[str, Any] | None) -> Calls | None:
    """Return kinds with traffic, measured or predicted; None before any measurement."""
    measured_bytes = {
        name: formatting.number(latest.get(f"comm/{name}")) for name, title, description in CALLS
    }
    if all(value is None for value in measured_bytes.values()):
        return None
    predicted_bytes = {
        name: formatting.number((collectives or {}).get(name)) for name, title, description in CALLS
    }
    most = max(
        [
            value
            for values in (measured_bytes, predicted_bytes)
            for value in values.values()
            if value
        ]
        or [1.0]
    )
    rows = []
    for name, title, description in CALLS:
        measured, predicted = measured_bytes[name], predicted_bytes[name]
        if not measured and not predicted:
            continue
        share = measured / predicted - 1 if measured is not None and predicted else None
        rows.append(
            Call(
                title,
                description,
                _size(measured),
                _size(predicted) if collectives else formatting.DASH,
                round(100 * (measured or 0.0) / most, 2),
                round(100 * (predicted or 0.0) / most, 2),
                "" if share is None else f"{share:+.1%}".replace("-", "−"),
                "" if share is None or abs(share) <= _FAR else "warn",
            )
        )
    return Calls(rows, _summary(rows, latest, bool(collectives)), bool(collectives))


def _summary(rows: list[Call], latest: Mapping[str, float], has_prediction: bool) -> str:
    if not rows:
        return _("The rank sent nothing in its newest step.")
    total, exposed, step = (
        formatting.number(latest.get(name))
        for name in ("comm/bytes", "comm/exposed_s", "step_time_s")
    )
    text = _("Newest step")
    if total:
        text = _("%(size)s in the newest step") % {"size": formatting.memory(total)}
    if exposed is not None and step:
        text += _("; %(time)s exposed, %(share)s of the step") % {
            "time": formatting.seconds(exposed),
            "share": formatting.percent(exposed / step),
        }
    if not has_prediction:
        return _("%(text)s. No prediction for this plan's collectives.") % {"text": text}
    far = [row.title for row in rows if row.mood]
    if far:
        return _("%(text)s. Differs from the prediction: %(kinds)s.") % {
            "text": text,
            "kinds": formatting.listed(far),
        }
    return _("%(text)s. All kinds match the prediction.") % {"text": text}


def _size(value: float | None) -> str:
    return formatting.DASH if value is None else formatting.memory(value) if value else _("none")
