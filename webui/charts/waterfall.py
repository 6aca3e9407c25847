"""Inference requests as bars over time: queued, prefill, decode. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _

from webui.presentation import formatting
from workers.contracts.wire.serving_reports import RequestStats

MOST: Final = 60  # rows
_TICKS: Final = 5
_IDLE_S: Final = 2.0  # longer pauses are left out of the axis
_LEAST_S: Final = 1.0  # minimal axis length, so a single short request does not look slow


@dataclass(frozen=True, slots=True)
class Segment:
    """`left` and `width` in percent of the axis; `part` is queued, prefill or decode."""

    part: str
    left: float
    width: float
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    """One request as formatted values and its segments."""

    id: str
    state: str
    segments: list[Segment]
    prompt: str
    cached: str
    output: str
    first: str
    per_token: str
    preemptions: int
    finish: str
    description: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Rows of a request timeline; `breaks` are places in percent where the axis skips time."""

    rows: list[Row]
    ticks: list[dict[str, Any]]
    left_out: int
    breaks: list[float]


def waterfall(requests: Sequence[RequestStats], *, now_s: float | None = None) -> Waterfall:
    """Lay out requests, newest first, running ones before ended ones.

    Bars of running requests end at `now_s`. Times without requests are left out of the axis.
    """
    alive = [row for row in requests if row.state != "ended"]
    ended = [row for row in requests if row.state == "ended"]
    order = [
        *sorted(alive, key=lambda row: -row.added_s),
        *sorted(ended, key=lambda row: -row.added_s),
    ]
    shown = order[:MOST]
    if not shown:
        return Waterfall([], [], 0, [])
    axis = Axis([(row.added_s, _end(row, now_s)) for row in shown])
    ticks = [
        {
            "at": round(100 * i / (_TICKS - 1), 2),
            "label": formatting.seconds(axis.total_s * i / (_TICKS - 1), 2),
        }
        for i in range(_TICKS)
    ]
    return Waterfall(
        [_row(row, axis, now_s) for row in shown], ticks, len(order) - len(shown), axis.breaks
    )


class Axis:
    """Busy times joined end to end, in percent of their sum."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._busy: list[list[float]] = []
        for begin, end in sorted(spans):
            if self._busy and begin <= self._busy[-1][1] + _IDLE_S:
                self._busy[-1][1] = max(self._busy[-1][1], end)
            else:
                self._busy.append([begin, end])
        self.total_s = max(_LEAST_S, sum(end - begin for begin, end in self._busy))

    @property
    def breaks(self) -> list[float]:
        """Places in percent where a pause is left out."""
        return [round(self.at(begin), 3) for begin, _ in self._busy[1:]]

    def at(self, time_s: float) -> float:
        """Return the place of a time in percent."""
        done = sum(min(max(time_s - begin, 0.0), end - begin) for begin, end in self._busy)
        return 100 * done / self.total_s


def first_token_s(row: RequestStats) -> float | None:
    """Return the time to first token in seconds; None before it."""
    return row.first_token_s - row.added_s if row.first_token_s is not None else None


def per_token_s(row: RequestStats, now_s: float | None) -> float | None:
    """Return the mean time between output tokens in seconds; None with fewer than two."""
    if row.first_token_s is None or row.new_tokens < 2:
        return None
    return max(0.0, _end(row, now_s) - row.first_token_s) / (row.new_tokens - 1)


def _end(row: RequestStats, now_s: float | None) -> float:
    if row.ended_s is not None:
        return row.ended_s
    return now_s if now_s is not None else max(row.added_s, row.first_token_s or 0.0)


def _row(row: RequestStats, axis: Axis, now_s: float | None) -> Row:
    end = _end(row, now_s)
    admitted = row.admitted_s if row.admitted_s is not None else end
    first = row.first_token_s if row.first_token_s is not None else end
    spans = [
        ("queued", row.added_s, admitted),
        ("prefill", admitted, first),
        ("decode", first, end),
    ]
    segments = [
        Segment(
            part,
            round(axis.at(a), 3),
            round(axis.at(b) - axis.at(a), 3),
            f"{part} {formatting.seconds(b - a)}",
        )
        for part, a, b in spans
        if b > a
    ]
    durations = ", ".join(segment.label for segment in segments)
    drafts = ""
    if row.drafted:
        drafts = _(", %(accepted)s of %(drafted)s draft tokens accepted") % {
            "accepted": row.accepted,
            "drafted": row.drafted,
        }
    return Row(
        id=row.id[-10:],
        state=row.state,
        segments=segments,
        prompt=f"{row.prompt_tokens:,}",
        cached=f"{row.shared_tokens:,}" if row.shared_tokens else "",
        output=_("%(count)s of %(limit)s")
        % {"count": f"{row.new_tokens:,}", "limit": f"{row.max_new_tokens:,}"},
        first=formatting.seconds(first_token_s(row)),
        per_token=formatting.seconds(per_token_s(row, now_s)),
        preemptions=row.preemptions,
        finish=row.finish or "",
        description=f"{row.id}: {durations}{drafts}",
    )
