"""Which of a writer's numbers have arrived, as merged ascending ranges [[first, last], ...].

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from orchestrator.telemetry.packing.chunks import Ints, Mask

Ranges = list[list[int]]


def unknown(ranges: Ranges, seqs: Ints) -> Mask:
    """Which of the numbers have not arrived before; a number that stands there twice is new once."""
    if len(seqs) and _ascends(seqs) and (not ranges or int(seqs[0]) > ranges[-1][1]):
        return np.ones(len(seqs), np.bool_)
    new = np.zeros(len(seqs), np.bool_)
    new[np.unique(seqs, return_index=True)[1]] = True
    for first, last in ranges:
        new &= (seqs < first) | (seqs > last)
    return new


def add(ranges: Ranges, seqs: Ints) -> Ranges:
    """The ranges with these numbers too."""
    if not len(seqs):
        return ranges
    first, last = int(seqs[0]), int(seqs[-1])
    if last - first + 1 == len(seqs) and _ascends(seqs):
        if ranges and first == ranges[-1][1] + 1:
            return [*ranges[:-1], [ranges[-1][0], last]]
        found = [[first, last]]
    else:
        ordered = np.unique(seqs)
        cuts = np.flatnonzero(np.diff(ordered) > 1)
        starts, ends = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(ordered) - 1]
        found = [[int(ordered[a]), int(ordered[b])] for a, b in zip(starts, ends, strict=True)]
    return _merged([*ranges, *found])


def complete_to(ranges: Ranges) -> int:
    """The number up to which nothing is missing, 0 when nothing has arrived: what a writer need not
    send again.
    """
    return ranges[0][1] if ranges else 0


def _ascends(seqs: Ints) -> bool:
    return len(seqs) < 2 or bool(np.all(seqs[1:] > seqs[:-1]))


def _merged(ranges: Iterable[list[int]]) -> Ranges:
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = [found[-1][0], max(found[-1][1], last)]
        else:
            found.append([first, last])
    return found
