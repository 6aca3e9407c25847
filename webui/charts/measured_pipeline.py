"""A sampled step of a pipeline as its ranks told it, in the planner's shape and beside its
prediction. Pure.

Actions are `[kind, stage, micro_batch, start_s, end_s]`: F, B (full backward), I (input gradient),
W (weight gradient),
and waits, send and recv. Seconds count from the step's first action on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from webui.planner.charts.pipeline import Pipeline, Row, pipeline, rows_of
from webui.presentation import formatting

_KINDS: Final = {"F": "F", "B": "B", "I": "B", "W": "W", "send": "C", "recv": "C"}
# measured and predicted lengths further apart than this are drawn each to its own scale
_APART: Final = 4.0
_CLOSE: Final = 0.03  # bubble fractions nearer than this are alike


@dataclass(frozen=True, slots=True)
class Beside:
    """The measured timeline above the predicted one; `says` is both bubbles in words, `scale` how
    they are drawn.
    """

    step: int
    measured: Pipeline
    predicted: Pipeline | None
    says: str
    scale: str

    @property
    def table(self) -> list[tuple[Row, Row | None]]:
        """Rows by pipeline rank, measured and predicted."""
        foreseen = {row.device: row for row in self.predicted.rows} if self.predicted else {}
        return [(row, foreseen.get(row.device)) for row in self.measured.rows]


def newest_step(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The data of the newest step that most pipeline ranks told, one a rank: later ranks may still
    be on their way.
    """
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


def measured_rows(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As `orchestrator.planner.schedules.timeline`.

    Waits that began before the first action begin with it.
    """
    rows: list[dict[str, Any]] = []
    for data in told:
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
        for data in told
        if (share := formatting.number(data.get("bubble_fraction"))) is not None
    ]
    return {
        "devices": max((int(data["pp_rank"]) for data in told), default=-1) + 1,
        "drawn_s": max((row["end_s"] for row in rows), default=0.0),
        "rows": rows,
        "bubble_fraction": fmean(bubbles) if bubbles else None,
    }


def beside(
    events: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any] | None
) -> Beside | None:
    """None where no rank told a step.

    Both timelines share one scale unless their lengths are worlds apart.
    """
    told = newest_step(events)
    if not told:
        return None
    found = measured_rows(told)
    long, foreseen = float(found["drawn_s"]), float(predicted["drawn_s"]) if predicted else 0.0
    alike = bool(foreseen) and 1 / _APART <= long / foreseen <= _APART
    end = max(long, foreseen) if alike else None
    rows, legend, over = rows_of(found, end_s=end)
    step = int(told[0]["step"])
    micro_batches = {row["micro_batch"] for row in found["rows"] if row["kind"] != "C"}
    bubble = found["bubble_fraction"]
    batches = formatting.count(len(micro_batches), "micro-batch", "micro-batches")
    summary = f"Step {step:,} took {formatting.seconds(long)} for {batches}"
    summary += (
        f"; ranks were idle {formatting.percent(bubble)} of it." if bubble is not None else "."
    )
    note = (
        ""
        if len(told) == found["devices"]
        else f"{found['devices'] - len(told)} pipeline ranks told nothing of it."
    )
    return Beside(
        step,
        Pipeline(rows, legend, over, summary, note),
        pipeline(predicted, end_s=end) if predicted else None,
        _says(bubble, predicted),
        _scale(long, foreseen, alike) if predicted else "",
    )


def _says(bubble: float | None, predicted: Mapping[str, Any] | None) -> str:
    """Both bubbles in one sentence."""
    if bubble is None:
        return "The ranks did not tell how long they were idle."
    foreseen = (
        formatting.number(predicted.get("predicted_bubble", predicted["bubble_fraction"]))
        if predicted
        else None
    )
    if foreseen is None:
        return (
            f"The bubble is {formatting.percent(bubble)} of the step; nothing was predicted of it."
        )
    says = (
        f"The bubble is {formatting.percent(bubble)} of the step, {formatting.percent(foreseen)} was "
        "predicted"
    )
    if abs(bubble - foreseen) <= _CLOSE:
        return f"{says}: within {100 * _CLOSE:.0f} points."
    more = f"{abs(100 * (bubble - foreseen)):.1f} points {'more' if bubble > foreseen else 'less'}"
    return f"{says}: {more}."


def _scale(long: float, foreseen: float, alike: bool) -> str:
    if alike:
        return "Both are drawn to one scale."
    times = max(long, foreseen) / max(min(long, foreseen), 1e-12)
    slower = "longer" if long > foreseen else "shorter"
    return f"Each is drawn to its own scale: measured is {times:.1f} times {slower} than predicted."
