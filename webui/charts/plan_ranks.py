"""Plans that were tried before a run: bars of predicted and measured step times, and their ranks.

Positions are in percent. Pure functions of the table of trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting

STATES: Final = {
    "waiting": (gettext_noop("waiting"), ""),
    "trying": (gettext_noop("being tried"), "running"),
    "measured": (gettext_noop("measured"), ""),
    "slower": (gettext_noop("slower, stopped early"), ""),
    "failed": (gettext_noop("failed"), "bad"),
    "not_tried": (gettext_noop("not tried"), ""),
}


@dataclass(frozen=True, slots=True)
class Link:
    """A plan's line from its predicted place (left) to its measured place (right), in percent."""

    left: float
    right: float
    name: str
    predicted: str
    measured: str
    title: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan in the table; `*_at` are positions of its bars in percent of the longest time."""

    rank: int
    plan: Mapping[str, Any]
    name: str
    state: str
    mood: str
    chosen: bool
    predicted: str
    predicted_at: float
    measured: str
    measured_at: float | None
    low_at: float
    high_left: float
    spread: str
    off: str
    off_mood: str
    measured_rank: int | None
    predicted_peak: str
    peak: str
    steps: int
    took: str
    message: str


def name_of(plan: Mapping[str, Any]) -> str:
    """The plan in short form; with its schedule, which may be all that differs."""
    parts, _precision = formatting.plan_parts(plan)
    if int(plan.get("pp") or 1) > 1:
        parts = [*parts, str(plan.get("schedule") or "")]
    return "·".join(parts)


def rows_of(table: Mapping[str, Any]) -> list[PlanRow]:
    """The plans in the order of predictions."""
    times = [
        value
        for row in table["rows"]
        for value in (row["predicted_s"], row.get("high_s"), row.get("step_time_s"))
        if value
    ]
    most = max(times, default=1.0)
    return [_row(row, most) for row in table["rows"]]


def _row(row: Mapping[str, Any], most: float) -> PlanRow:
    measured, state = row.get("step_time_s"), str(row["state"])
    failed = state == "failed"
    title, mood = STATES[state]
    share = measured / row["predicted_s"] - 1 if measured and not failed else None
    low, high = row.get("low_s") or measured or 0.0, row.get("high_s") or measured or 0.0
    return PlanRow(
        rank=int(row["rank"]),
        plan=row["plan"],
        name=name_of(row["plan"]),
        state=_("chosen") if row["chosen"] else _(title),
        mood="good" if row["chosen"] else mood,
        chosen=bool(row["chosen"]),
        predicted=formatting.seconds(row["predicted_s"]),
        predicted_at=round(100 * row["predicted_s"] / most, 2),
        measured=formatting.seconds(measured) if share is not None else formatting.DASH,
        measured_at=round(100 * float(measured or 0) / most, 2) if share is not None else None,
        low_at=round(100 * low / most, 2),
        high_left=round(100 - 100 * high / most, 2),
        spread=f"{formatting.seconds(low)} – {formatting.seconds(high)}",
        off=_error(share),
        off_mood="" if share is None or abs(share) <= 0.1 else "good" if share < 0 else "warn",
        measured_rank=row.get("measured_rank"),
        predicted_peak=formatting.memory(row["predicted_bytes"]),
        peak=formatting.memory(row["peak_bytes"]) if row.get("peak_bytes") else formatting.DASH,
        steps=int(row["steps"]),
        took=formatting.seconds(row["seconds"]) if row["seconds"] else formatting.DASH,
        message=str(row.get("message") or ""),
    )


def _error(share: float | None) -> str:
    """Measured over predicted, as a change; as a factor if it is large."""
    if share is None:
        return formatting.DASH
    return f"× {1 + share:.1f}" if share > 1 else f"{share:+.0%}".replace("-", "−")


def links_of(rows: Sequence[PlanRow]) -> list[Link]:
    """Lines from predicted to measured ranks; empty for fewer than two measured plans."""
    timed = [row for row in rows if row.measured_rank is not None and row.measured_at is not None]
    if len(timed) < 2:
        return []
    places = {row.rank: place for place, row in enumerate(timed)}
    step = 100 / len(timed)
    return [
        Link(
            left=round(step * (places[row.rank] + 0.5), 2),
            right=round(step * ((row.measured_rank or 1) - 0.5), 2),
            name=row.name,
            predicted=row.predicted,
            measured=row.measured,
            title=_("Plan %(rank)s by prediction, %(measured)s by measurement")
            % {"rank": row.rank, "measured": row.measured_rank},
            chosen=row.chosen,
        )
        for row in timed
    ]


def summary(table: Mapping[str, Any], rows: Sequence[PlanRow], *, alive: bool) -> str:
    """What the trials found, in one or two sentences."""
    chosen = next((row for row in rows if row.chosen), None)
    count = len(rows)
    if chosen is None and table["current"]:
        text = _("Trying plan %(number)s of %(count)s.")
        return text % {"number": table["current"], "count": count}
    tried = sum(row.steps > 0 for row in rows)
    if chosen is None and alive and tried:
        text = _("%(tried)s of %(count)s plans measured so far; none is chosen yet.")
        return text % {"tried": tried, "count": count}
    if chosen is None and alive:
        return ngettext(
            "%(count)s plan will be tried once the run has its devices.",
            "%(count)s plans will be tried once the run has its devices.",
            count,
        ) % {"count": count}
    if chosen is None:
        return _("The run ended before a plan was chosen.")
    first = rows[0]
    took = formatting.duration(table["spent_s"])
    if chosen.rank == first.rank:
        text = _(
            "The plan predicted fastest is the fastest: %(time)s per step. Trials took %(took)s."
        )
        return text % {"time": chosen.measured, "took": took}
    gain = _gain(table)
    text = _(
        "Plan %(rank)s by prediction is the fastest: %(time)s per step%(gain)s. "
        "Trials took %(took)s."
    )
    return text % {
        "rank": chosen.rank,
        "time": chosen.measured,
        "gain": gain,
        "took": took,
    }


def _gain(table: Mapping[str, Any]) -> str:
    first = table["rows"][0]
    chosen = next(row for row in table["rows"] if row["chosen"])
    before, after = first.get("step_time_s"), chosen.get("step_time_s")
    if first["state"] == "failed" or not before or not after:
        return _("; the one predicted fastest failed") if first["state"] == "failed" else ""
    return _(", %(share)s less than the one predicted fastest") % {
        "share": formatting.percent(1 - after / before)
    }
