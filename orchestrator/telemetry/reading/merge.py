"""One curve out of several attempts and ranks: per step the newest attempt wins, and in it the
lowest rank.

Short metrics are merged step by step. Of long ones a writer owns the whole range of steps that it
covers, so that
nothing below it has to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.telemetry.packing.chunks import EMPTY, Curve, Ints, join_curves
from orchestrator.telemetry.reading.levels import Source, Window, load

_STEP_BY_STEP = 20_000  # points of all writers together: some 80 chunks, 2 ms


LAST_STEP = 2**62
Rewinds = Sequence[Sequence[int]]  # [[newest attempt by then, step it went back to], …]


@dataclass(frozen=True, slots=True)
class Merged:
    """`points` by step; `total` counts those they stand for; `last_seq` is the newest attempt's
    newest number.
    """

    points: Curve
    total: int
    last_seq: int
    attempt: int | None = None
    rank: int | None = None


def merge(sources: list[Source], window: Window, *, enough: int, rewinds: Rewinds = ()) -> Merged:
    """`sources` come by falling precedence; of what was given up by `rewinds` nothing shows.

    `after_seq` counts within the newest attempt: older ones have been seen, unless it is beyond all
    of the newest
    attempt's numbers and so belongs to an older one.
    """
    if not sources:
        return Merged(EMPTY, 0, 0)
    newest = sources[0].attempt
    last_seq = max(source.last_seq for source in sources if source.attempt == newest)
    if window.after_seq is not None:
        if window.after_seq <= last_seq or sources[-1].attempt == newest:
            sources = [source for source in sources if source.attempt == newest]
        else:
            window = replace(window, after_seq=None)
            return replace(
                merge(sources, window, enough=enough, rewinds=rewinds), last_seq=last_seq
            )
    one_by_one = sum(source.total for source in sources) <= _STEP_BY_STEP
    parts: list[Curve] = []
    exact = one_by_one
    owned: list[tuple[int, int]] = []
    total = 0
    for source in sources:
        first, last = source.steps
        if any(low <= first and last <= high for low, high in owned) and not one_by_one:
            continue
        part = load(
            source, replace(window, without=(*owned, *given_up(source, rewinds))), enough=enough
        )
        total += part.total
        parts.append(part.points)
        exact = exact and part.exact
        if not (one_by_one and part.exact) or _gapless(part.points, first, last):
            owned.append((first, last))
    points = join_curves(parts)
    if exact:
        points = points.take(_first_of_each_step(points.step))
        total = len(points)
    elif len(parts) > 1:
        points = points.take(np.argsort(points.step, kind="stable"))
    return Merged(points, total, last_seq, newest, sources[0].rank)


def given_up(source: Source, rewinds: Rewinds) -> tuple[tuple[int, int], ...]:
    """Ranges of steps of this attempt that a rewind went back before."""
    steps = [step for attempt, step in rewinds if source.attempt <= attempt]
    return ((min(steps) + 1, LAST_STEP),) if steps else ()


def _gapless(points: Curve, first: int, last: int) -> bool:
    return len(points) == last - first + 1 and bool(np.all(np.diff(points.step) == 1))


def _first_of_each_step(step: Ints) -> Ints:
    """Indices, by step, of the first point that has it."""
    return np.unique(step, return_index=True)[1]
