"""Rows whose answers the student has written, in place of the given ones.

Does not generate. Positions count inputs, as in `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from workers.training.data.rows import Row, RowSource


class OnPolicyRows:
    """A `RowSource` whose rows can be replaced for a step; earlier replacements are dropped."""

    uniform = False

    def __init__(self, samples: RowSource) -> None:
        self.samples = samples
        self.seq_len, self.names, self.windows = samples.seq_len, samples.names, samples.windows
        self.masked = samples.masked
        self._replaced: dict[int, Row] = {}

    def source(self, index: int) -> int:
        """See `RowSource`."""
        return self.samples.source(index)

    def row(self, index: int) -> Row:
        """Global sample `index` as it is trained on."""
        return self._replaced.get(index) or self.given(index)

    def given(self, index: int) -> Row:
        """Global sample `index` with its own answer."""
        return self.samples.row(index)

    def replace(self, rows: Mapping[int, Row]) -> None:
        """Use these rows in place of the given ones of their indices."""
        self._replaced = dict(rows)


def prompt_of(row: Row) -> list[int]:
    """The ids before the row's first token with loss."""
    first = int(np.flatnonzero(row.weights)[0])
    return [int(number) for number in row.ids[: first + 1]]


def answered_row(prompt: Sequence[int], answer: Sequence[int], seq_len: int) -> Row:
    """A row of a prompt and an answer, all of whose tokens have loss; both fit."""
    ids, weights = np.zeros(seq_len + 1, dtype=np.int64), np.zeros(seq_len, dtype=np.float32)
    size = len(prompt) + len(answer)
    ids[:size] = [*prompt, *answer]
    weights[len(prompt) - 1 : size - 1] = 1.0
    return Row(ids, weights, (0, size) if size < seq_len else (0,))
