"""A histogram as bars in percent of its area, for drawing without a script. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from webui.presentation import formatting


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in percent of width and height, measured from the top left; `title` says its count."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars, and the texts at the ends of both axes."""

    bars: list[Bar]
    first: str
    last: str
    most: str
    summary: str


def histogram_bars(counts: Sequence[float], edges: Sequence[float]) -> Bars:
    """Bars of `counts` between `edges`, whose widths are those of the bins."""
    most, span = max(counts) or 1.0, edges[-1] - edges[0]
    number = formatting.quantity
    bars = [
        Bar(
            round(100 * (left - edges[0]) / span, 3),
            round(100 - 100 * count / most, 3),
            round(100 * (right - left) / span, 3),
            round(100 * count / most, 3),
            f"{number(left)} – {number(right)}: {number(count)}",
        )
        for count, left, right in zip(counts, edges, edges[1:], strict=False)
        if count
    ]
    highest = max(range(len(counts)), key=lambda place: counts[place])
    summary = f"{number(edges[highest])} – {number(edges[highest + 1])}: {number(counts[highest])}"
    return Bars(bars, number(edges[0]), number(edges[-1]), number(max(counts)), summary)
