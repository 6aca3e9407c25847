"""Sequence numbers that have arrived, as merged ascending ranges [[first, last], ...].

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from orchestrator.telemetry.packing.chunks import Ints, Mask

Ranges = list[list[int]]


def unknown(ranges: Ranges, seqs: Ints) -> Mask:
    """Mask of the numbers that have not arrived before; a duplicate is new only once."""
    if len(seqs) and _ascending(seqs) and (not ranges or int(seqs[0]) > ranges[-1][1]):
        return np.ones(len(seqs), np.bool_)
    new = np.zeros(len(seqs), np.bool_)
    new[np.unique(seqs, return_index=True)[1]] = True
    for first, last in ranges:
        new &= (seqs < first) | (seqs > last)
    return new


def add(ranges: Ranges, seqs: Ints) -> Ranges:
    """The ranges extended by these numbers."""
    if not len(seqs):
        return ranges
    first, last = int(seqs[0]), int(seqs[-1])
    if last - first + 1 == len(seqs) and _ascending(seqs):
        if ranges and first == ranges[-1][1] + 1:
            return [*ranges[:-1], [ranges[-1][0], last]]
        added = [[first, last]]
    else:
        ordered = np.unique(seqs)
        gaps = np.flatnonzero(np.diff(ordered) > 1)
        starts, ends = [0, *(gaps + 1).tolist()], [*gaps.tolist(), len(ordered) - 1]
        added = [[int(ordered[a]), int(ordered[b])] for a, b in zip(starts, ends, strict=True)]
    return _merged([*ranges, *added])


def cover(ranges: Ranges, lost: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges extended by `(first, last)` numbers that will never arrive."""
    added = [[first, last] for first, last in lost if first <= last]
    return _merged([*ranges, *added]) if added else ranges


def complete_to(ranges: Ranges) -> int:
    """The last number of the first range: the writer need not resend up to here; 0 if empty."""
    return ranges[0][1] if ranges else 0


def _ascending(seqs: Ints) -> bool:
    return len(seqs) < 2 or bool(np.all(seqs[1:] > seqs[:-1]))


def _merged(ranges: Iterable[list[int]]) -> Ranges:
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = [merged[-1][0], max(merged[-1][1], last)]
        else:
            merged.append([first, last])
    return merged
