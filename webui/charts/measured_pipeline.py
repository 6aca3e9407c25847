"""Compares a sampled pipeline step with its prediction. Pure functions.

Actions are `[kind, stage, micro_batch, start_s, end_s]`: F, B (full backward), I (input gradient),
W (weight gradient),
send and recv (waits). Seconds count from the step's first action on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.planner.charts.pipeline import Pipeline, Row, pipeline, timeline_rows
from webui.presentation import formatting

_KINDS: Final = {"F": "F", "B": "B", "I": "B", "W": "W", "send": "C", "recv": "C"}
# if lengths differ by more than this factor, each timeline has its own scale
_APART: Final = 4.0
_CLOSE: Final = 0.03  # bubble fractions closer than this count as equal


@dataclass(frozen=True, slots=True)
class TimelineComparison:
    """Measured and predicted timeline; `summary` compares bubbles, `scale` explains axes."""

    step: int
    measured: Pipeline
    predicted: Pipeline | None
    summary: str
    scale: str

    @property
    def table(self) -> list[tuple[Row, Row | None]]:
        """Rows by pipeline rank, measured and predicted."""
        predicted = {row.device: row for row in self.predicted.rows} if self.predicted else {}
        return [(row, predicted.get(row.device)) for row in self.measured.rows]


def newest_step(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the reports of the newest step that most ranks reported, one per rank."""
    by_step: dict[int, dict[int, Mapping[str, Any]]] = {}
    for data in events:
        step, rank = formatting.number(data.get("step")), formatting.number(data.get("pp_rank"))
        if step is not None and rank is not None and isinstance(data.get("actions"), list):
            by_step.setdefault(int(step), {})[int(rank)] = data
    if not by_step:
        return []
    most = max(len(ranks) for ranks in by_step.values())
    step = max(step for step, ranks in by_step.items() if len(ranks) == most)
    return [data for _, data in sorted(by_step[step].items())]


def measured_rows(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows like `orchestrator.planner.schedules.timeline`; no wait starts before 0."""
    rows: list[dict[str, Any]] = []
    for data in reports:
        for kind, stage, micro_batch, start_s, end_s in data["actions"]:
            if kind in _KINDS and end_s > 0:
                rows.append(
                    {
                        "device": int(data["pp_rank"]),
                        "stage": int(stage),
                        "micro_batch": int(micro_batch),
                        "kind": _KINDS[kind],
                        "start_s": max(0.0, float(start_s)),
                        "end_s": float(end_s),
                    }
                )
    bubbles = [
        share
        for data in reports
        if (share := formatting.number(data.get("bubble_fraction"))) is not None
    ]
    return {
        "devices": max((int(data["pp_rank"]) for data in reports), default=-1) + 1,
        "drawn_s": max((row["end_s"] for row in rows), default=0.0),
        "rows": rows,
        "bubble_fraction": fmean(bubbles) if bubbles else None,
    }


def compare(
    events: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any] | None
) -> TimelineComparison | None:
    """Compare the newest sampled step with the prediction; None without a sampled step.

    Both timelines share one scale unless their lengths differ by more than 4x.
    """
    reports = newest_step(events)
    if not reports:
        return None
    measured = measured_rows(reports)
    length, predicted_s = (
        float(measured["drawn_s"]),
        float(predicted["drawn_s"]) if predicted else 0.0,
    )
    alike = bool(predicted_s) and 1 / _APART <= length / predicted_s <= _APART
    end = max(length, predicted_s) if alike else None
    rows, legend, over = timeline_rows(measured, end_s=end)
    step = int(reports[0]["step"])
    micro_batches = {row["micro_batch"] for row in measured["rows"] if row["kind"] != "C"}
    bubble = measured["bubble_fraction"]
    count = len(micro_batches)
    summary = ngettext(
        "Step %(step)s took %(time)s for %(count)s micro-batch",
        "Step %(step)s took %(time)s for %(count)s micro-batches",
        count,
    ) % {"step": f"{step:,}", "time": formatting.seconds(length), "count": f"{count:,}"}
    if bubble is not None:
        summary += _("; ranks were idle for %(share)s of it") % {
            "share": formatting.percent(bubble)
        }
    summary += "."
    missing = measured["devices"] - len(reports)
    note = ""
    if missing:
        note = ngettext(
            "%(count)s pipeline rank did not report it.",
            "%(count)s pipeline ranks did not report it.",
            missing,
        ) % {"count": missing}
    return TimelineComparison(
        step,
        Pipeline(rows, legend, over, summary, note),
        pipeline(predicted, end_s=end) if predicted else None,
        _summary(bubble, predicted),
        _scale(length, predicted_s, alike) if predicted else "",
    )


def _summary(bubble: float | None, predicted: Mapping[str, Any] | None) -> str:
    """Compare both bubbles in one sentence."""
    if bubble is None:
        return _("The ranks did not report their idle time.")
    expected = (
        formatting.number(predicted.get("predicted_bubble", predicted["bubble_fraction"]))
        if predicted
        else None
    )
    measured = formatting.percent(bubble)
    if expected is None:
        return _("The bubble is %(measured)s of the step; there is no prediction.") % {
            "measured": measured
        }
    text = _("The bubble is %(measured)s of the step, predicted %(predicted)s") % {
        "measured": measured,
        "predicted": formatting.percent(expected),
    }
    if abs(bubble - expected) <= _CLOSE:
        difference = _("within %(points)s points") % {"points": f"{100 * _CLOSE:.0f}"}
    else:
        more = _("%(points)s points more") if bubble > expected else _("%(points)s points less")
        difference = more % {"points": f"{abs(100 * (bubble - expected)):.1f}"}
    return f"{text}: {difference}."


def _scale(measured_s: float, predicted_s: float, alike: bool) -> str:
    if alike:
        return _("Both timelines use one scale.")
    times = max(measured_s, predicted_s) / max(min(measured_s, predicted_s), 1e-12)
    text = _("Each timeline has its own scale: measured is %(times)s times longer than predicted.")
    if measured_s <= predicted_s:
        text = _(
            "Each timeline has its own scale: measured is %(times)s times shorter than predicted."
        )
    return text % {"times": f"{times:.1f}"}
