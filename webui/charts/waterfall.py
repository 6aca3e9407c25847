"""Requests of an engine as bars over time: queued, prefill, decode.

Pure; knows the contract, no server and no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting
from workers.contracts.wire.serving_reports import RequestTold

MOST: Final = 60  # rows
_TICKS: Final = 5
_IDLE_S: Final = 2.0  # a pause that is shown as it is
_LEAST_S: Final = 1.0  # of the axis: a lone request does not look as if it took forever


@dataclass(frozen=True, slots=True)
class Piece:
    """`left` and `width` in per cent of the axis; `part` is queued, prefill or decode."""

    part: str
    left: float
    width: float
    says: str


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    state: str
    pieces: list[Piece]
    prompt: str
    shared: str
    new: str
    first: str
    pace: str
    preemptions: int
    finish: str
    says: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    rows: list[Row]
    ticks: list[dict[str, Any]]
    left_out: int
    breaks: list[float]


def waterfall(requests: Sequence[RequestTold], *, now_s: float | None = None) -> Waterfall:
    """The newest first, those on their way before those that ended. `now_s` is where bars of the
    living end.

    Times without any request are cut out of the axis; `breaks` are their places.
    """
    alive = [each for each in requests if each.state != "ended"]
    ended = [each for each in requests if each.state == "ended"]
    order = [
        *sorted(alive, key=lambda each: -each.added_s),
        *sorted(ended, key=lambda each: -each.added_s),
    ]
    shown = order[:MOST]
    if not shown:
        return Waterfall([], [], 0, [])
    axis = Axis([(each.added_s, _end(each, now_s)) for each in shown])
    ticks = [
        {
            "at": round(100 * i / (_TICKS - 1), 2),
            "says": formatting.seconds(axis.total_s * i / (_TICKS - 1), 2),
        }
        for i in range(_TICKS)
    ]
    return Waterfall(
        [_row(each, axis, now_s) for each in shown], ticks, len(order) - len(shown), axis.breaks
    )


class Axis:
    """Times of work laid end to end, in per cent of all of them."""

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
        return [round(self.at(begin), 3) for begin, _ in self._busy[1:]]

    def at(self, time_s: float) -> float:
        done = sum(min(max(time_s - begin, 0.0), end - begin) for begin, end in self._busy)
        return 100 * done / self.total_s


def first_token_s(each: RequestTold) -> float | None:
    return each.first_token_s - each.added_s if each.first_token_s is not None else None


def pace_s(each: RequestTold, now_s: float | None) -> float | None:
    """Mean time between two tokens of the answer."""
    if each.first_token_s is None or each.new_tokens < 2:
        return None
    return max(0.0, _end(each, now_s) - each.first_token_s) / (each.new_tokens - 1)


def _end(each: RequestTold, now_s: float | None) -> float:
    if each.ended_s is not None:
        return each.ended_s
    return now_s if now_s is not None else max(each.added_s, each.first_token_s or 0.0)


def _row(each: RequestTold, axis: Axis, now_s: float | None) -> Row:
    end = _end(each, now_s)
    admitted = each.admitted_s if each.admitted_s is not None else end
    first = each.first_token_s if each.first_token_s is not None else end
    spans = [
        ("queued", each.added_s, admitted),
        ("prefill", admitted, first),
        ("decode", first, end),
    ]
    pieces = [
        Piece(
            part,
            round(axis.at(a), 3),
            round(axis.at(b) - axis.at(a), 3),
            f"{part} {formatting.seconds(b - a)}",
        )
        for part, a, b in spans
        if b > a
    ]
    told = ", ".join(piece.says for piece in pieces)
    drafted = f", {each.accepted} of {each.drafted} draft tokens accepted" if each.drafted else ""
    return Row(
        id=each.id[-10:],
        state=each.state,
        pieces=pieces,
        prompt=f"{each.prompt_tokens:,}",
        shared=f"{each.shared_tokens:,}" if each.shared_tokens else "",
        new=f"{each.new_tokens:,} of {each.max_new_tokens:,}",
        first=formatting.seconds(first_token_s(each)),
        pace=formatting.seconds(pace_s(each, now_s)),
        preemptions=each.preemptions,
        finish=each.finish or "",
        says=f"{each.id}: {told}{drafted}",
    )
