"""The predicted time of a whole run by term, for the performance tab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting

# term → (label, hue)
_TERMS: Final = {
    "start_s": (gettext_noop("Start"), "time-2"),
    "trials_s": (gettext_noop("Trials of plans"), "mfu"),
    "steps_s": (gettext_noop("Steps"), "time"),
    "rollouts_s": (gettext_noop("Rollouts"), "split-generation"),
    "evaluation_s": (gettext_noop("Evaluation"), "throughput"),
    "checkpoints_s": (gettext_noop("Checkpoints"), "mem-optimizer"),
    "restarts_s": (gettext_noop("Expected restarts"), "split-exposed"),
}


@dataclass(frozen=True, slots=True)
class Term:
    """One bar; `left` and `width` in percent of the total."""

    label: str
    hue: str
    value: str
    left: float
    width: float


def content(prediction: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `{terms, total, interval, note}`; None for a run without this prediction."""
    whole = (prediction or {}).get("whole_run") or {}
    parts, total = whole.get("terms") or {}, formatting.number(whole.get("total_s"))
    if not parts or not total:
        return None
    terms, left = [], 0.0
    for name, (label, hue) in _TERMS.items():
        seconds = formatting.number(parts.get(name))
        if seconds is None:
            continue
        width = 100 * seconds / total
        text = formatting.seconds(seconds) if seconds >= 1 or not seconds else _("< 1 s")
        terms.append(Term(_(label), hue, text, round(left, 3), round(width, 3)))
        left += width
    return {
        "terms": terms,
        "total": formatting.estimate(total),
        "interval": _("%(low)s to %(high)s")
        % {
            "low": formatting.remaining(whole["low_s"]),
            "high": formatting.remaining(whole["high_s"]),
        },
        "note": _note(whole),
    }


def _note(whole: Mapping[str, Any]) -> str:
    """Where the start and the expected restarts come from."""
    count = int(whole.get("start_from") or 0)
    start = (
        ngettext(
            "Start: the median of %(count)s ended run of the pool.",
            "Start: the median of %(count)s ended runs of the pool.",
            count,
        )
        % {"count": count}
        if count
        else _("Start: a default, since no run of the pool has ended.")
    )
    restarts = whole.get("restarts")
    if not restarts:
        return start
    failures = int(restarts["failures"])
    history = ngettext(
        "%(number)s restarts expected: %(count)s failure of nodes in %(hours)s node-hours of the "
        "pool, and published rates.",
        "%(number)s restarts expected: %(count)s failures of nodes in %(hours)s node-hours of the "
        "pool, and published rates.",
        failures,
    ) % {
        "number": formatting.quantity(restarts["expected"], 2)
        if restarts["expected"] >= 0.01
        else "< 0.01",
        "count": failures,
        "hours": formatting.quantity(restarts["node_hours"]),
    }
    return f"{start} {history}"
