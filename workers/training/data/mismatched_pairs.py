"""Rows of labelled answers in which every prompt has the answer of the one before it.

A batch's first prompt has its last answer. Does not depend on ranks or losses.
"""

from __future__ import annotations

import numpy as np

from workers.training.data.rows import Row, RowSource, Segment


class MismatchedPairs:
    """A `RowSource` of the batch of `count` samples from `first` on: one row per answer."""

    uniform = False

    def __init__(self, samples: RowSource, *, first: int, count: int) -> None:
        self.seq_len, self.names, self.masked = samples.seq_len, samples.names, samples.masked
        rows = (samples.row(first + index) for index in range(count))
        self._answers = [(row, segment) for row in rows for segment in row.segments]
        self.windows = len(self._answers)

    def source(self, index: int) -> int:
        """The first one: losses of these rows are of no source."""
        return 0

    def row(self, index: int) -> Row:
        """The prompt of answer `index` with the answer before it, cut at the row's end."""
        row, segment = self._answers[index % self.windows]
        other, answered = self._answers[index % self.windows - 1]
        start, stop = segment.start, _first_target(row, segment) + 1
        begin, end = _first_target(other, answered), answered.stop - 1
        prompt, answer = row.ids[start:stop], other.ids[begin + 1 : end + 1]
        answer = answer[: self.seq_len - len(prompt)]
        length = len(prompt) + len(answer)
        ids = np.zeros(self.seq_len + 1, dtype=np.int64)
        ids[:length] = np.concatenate([prompt, answer])
        weights = np.zeros(self.seq_len, dtype=np.float32)
        weights[len(prompt) - 1 : length - 1] = other.weights[begin : begin + len(answer)]
        starts = (0, length) if length < self.seq_len else (0,)
        return Row(ids, weights, starts, (Segment(0, length, index, segment.role),))


def _first_target(row: Row, segment: Segment) -> int:
    """The position whose target is the answer's first token with loss."""
    trained = np.flatnonzero(row.weights[segment.start : segment.stop])
    return segment.start + int(trained[0])
