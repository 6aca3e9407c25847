"""Pipeline timeline of one step: a row of forward, backward and weight-gradient blocks per device.

All blocks of one kind and device are one SVG path, so thousands of blocks stay cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.planner.charts.axes import Axis, Tick, ticks
from webui.presentation import formatting

KINDS: Final = (
    ("F", gettext_noop("forward"), "pipe-forward"),
    ("B", gettext_noop("backward"), "pipe-backward"),
    ("W", gettext_noop("weight gradient"), "pipe-weight"),
    ("F&B", gettext_noop("forward and backward"), "pipe-both"),
    ("C", gettext_noop("communication"), "pipe-comm"),
)
_HUES: Final = {kind: hue for kind, label, hue in KINDS}
# idle share beyond the bubble that is mentioned; the drawing has fewer micro-batches
_UNEVEN: Final = 0.05
_NAMED: Final = 8  # rows are high enough for text up to this number of devices
NUMBERED: Final = 72  # rows show micro-batch numbers up to this number of blocks
_GAP: Final = 1.2  # largest gap between blocks, in a row 1000 wide
_COMM_TOP: Final = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One device: `paths` are `(color, d)`, `labels` are `(left, width, color, text)` in %."""

    device: int
    paths: list[tuple[str, str]]
    labels: list[tuple[float, float, str, str]]
    idle: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A drawn timeline with its legend and text."""

    rows: list[Row]
    legend: list[tuple[str, str]]
    ticks: list[Tick]
    summary: str
    note: str


def pipeline(drawn: Mapping[str, Any], *, end_s: float | None = None) -> Pipeline:
    """Draws a timeline of `orchestrator.planner.schedules.timeline`.

    `of` in it: micro-batches per step if fewer are drawn. `end_s`: end of the axis, to draw two
    timelines to one scale.
    """
    rows, legend, over = timeline_rows(drawn, end_s=end_s)
    shown, total = int(drawn["drawn"]), int(drawn.get("of", drawn["micro_batches"]))
    bubble = float(drawn.get("predicted_bubble", drawn["bubble_fraction"]))
    uneven = float(drawn["bubble_fraction"]) - bubble > _UNEVEN
    summary = ngettext(
        "%(schedule)s over %(devices)s devices with %(count)s micro-batch per step: the "
        "bubble takes %(share)s of the step.",
        "%(schedule)s over %(devices)s devices with %(count)s micro-batches per step: the "
        "bubble takes %(share)s of the step.",
        total,
    ) % {
        "schedule": drawn["schedule"],
        "devices": int(drawn["devices"]),
        "count": f"{total:,}",
        "share": formatting.percent(bubble),
    }
    if uneven:
        summary += _(" Because stages are uneven, devices idle %(share)s of the time shown.") % {
            "share": formatting.percent(drawn["bubble_fraction"])
        }
    note = ""
    if shown < total:
        note = _("%(count)s micro-batches are shown; the middle of a step repeats.") % {
            "count": shown
        }
    return Pipeline(rows, legend, over, summary, note)


def timeline_rows(
    drawn: Mapping[str, Any], *, end_s: float | None
) -> tuple[list[Row], list[tuple[str, str]], list[Tick]]:
    """Returns rows, legend and ticks; shared by predicted and measured timelines."""
    drawn_s = float(drawn["drawn_s"]) or 1.0
    end = max(end_s or 0.0, drawn_s)
    by_device: dict[int, list[Mapping[str, Any]]] = {
        device: [] for device in range(int(drawn["devices"]))
    }
    for row in drawn["rows"]:
        by_device[int(row["device"])].append(row)
    used = {str(row["kind"]) for row in drawn["rows"]}
    rows = [
        _row(device, blocks, end, drawn_s, len(by_device) <= _NAMED)
        for device, blocks in by_device.items()
    ]
    legend = [(_(label), hue) for kind, label, hue in KINDS if kind in used]
    return rows, legend, ticks(Axis(0.0, end), "s", 5)


def _row(
    device: int, blocks: list[Mapping[str, Any]], end: float, drawn_s: float, numbered: bool
) -> Row:
    paths = []
    for kind, _label, hue in KINDS:
        some = [block for block in blocks if block["kind"] == kind]
        if some:
            paths.append((hue, "".join(_block(block, end) for block in some)))
    labels = []
    if numbered and sum(block["kind"] != "C" for block in blocks) <= NUMBERED:
        for block in blocks:
            left, width = (
                100 * block["start_s"] / end,
                100 * (block["end_s"] - block["start_s"]) / end,
            )
            if width >= 1.2 and block["kind"] != "C":
                labels.append(
                    (
                        round(left, 2),
                        round(width, 2),
                        _HUES[block["kind"]],
                        str(block["micro_batch"] + 1),
                    )
                )
    busy = sum(block["end_s"] - block["start_s"] for block in blocks if block["kind"] != "C")
    return Row(device, paths, labels, formatting.percent(max(0.0, 1 - busy / drawn_s)))


def _block(block: Mapping[str, Any], end: float) -> str:
    left, right = 1000 * block["start_s"] / end, 1000 * block["end_s"] / end
    width = max(right - left - min(_GAP, 0.12 * (right - left)), 0.3)
    # communication is drawn below the blocks that wait for it
    top, high = (_COMM_TOP, 10 - _COMM_TOP) if block["kind"] == "C" else (0, 10)
    return f"M{left:.2f} {top}h{width:.2f}v{high}h-{width:.2f}z"
