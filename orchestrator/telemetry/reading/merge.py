"""Merges attempts and ranks into one curve: per step the newest attempt, then the lowest rank.

Short metrics are merged step by step. In long ones a writer owns the full range of steps that it
covers, so writers of lower precedence are not read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.telemetry.packing.chunks import EMPTY, Curve, Ints, join_curves
from orchestrator.telemetry.reading.levels import Source, Window, load

_STEP_BY_STEP = 20_000  # points of all writers together: about 80 chunks, 2 ms
LAST_STEP = 2**62
Rewinds = Sequence[Sequence[int]]  # [[newest attempt at that time, step it resumed from], …]


@dataclass(frozen=True, slots=True)
class Merged:
    """`points` by step represent `total` points; `last_seq` is the newest attempt's."""

    points: Curve
    total: int
    last_seq: int
    attempt: int | None = None
    rank: int | None = None


def merge(sources: list[Source], window: Window, *, enough: int, rewinds: Rewinds = ()) -> Merged:
    """Merge `sources`, ordered by precedence, without the steps that `rewinds` discarded.

    `after_seq` belongs to the newest attempt, so older attempts are omitted, unless it exceeds all
    of the newest attempt's numbers and so belongs to an older one.
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
    step_by_step = sum(source.total for source in sources) <= _STEP_BY_STEP
    parts: list[Curve] = []
    exact = step_by_step
    owned: list[tuple[int, int]] = []
    total = 0
    for source in sources:
        first, last = source.steps
        if any(low <= first and last <= high for low, high in owned) and not step_by_step:
            continue
        part = load(
            source,
            replace(window, without=(*owned, *rewound_steps(source, rewinds))),
            enough=enough,
        )
        total += part.total
        parts.append(part.points)
        exact = exact and part.exact
        if not (step_by_step and part.exact) or _gapless(part.points, first, last):
            owned.append((first, last))
    points = join_curves(parts)
    if exact:
        points = points.take(_first_of_each_step(points.step))
        total = len(points)
    elif len(parts) > 1:
        points = points.take(np.argsort(points.step, kind="stable"))
    return Merged(points, total, last_seq, newest, sources[0].rank)


def rewound_steps(source: Source, rewinds: Rewinds) -> tuple[tuple[int, int], ...]:
    """Ranges of this attempt's steps that a rewind discarded."""
    steps = [step for attempt, step in rewinds if source.attempt <= attempt]
    return ((min(steps) + 1, LAST_STEP),) if steps else ()


def _gapless(points: Curve, first: int, last: int) -> bool:
    return len(points) == last - first + 1 and bool(np.all(np.diff(points.step) == 1))


def _first_of_each_step(step: Ints) -> Ints:
    """Indices of the first point of each step, ordered by step."""
    return np.unique(step, return_index=True)[1]
