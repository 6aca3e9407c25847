"""Packing: every sample once, no row too long, few rows, the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest

from workers.training.data.examples.packing import GROUP, pack, shuffled


def test_rows_hold_every_sample_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, size=GROUP + 500)
    rows = pack(lengths, 512, order=shuffled(len(lengths), [7]))
    assert sorted(each for row in rows for each in row) == list(range(len(lengths)))
    assert max(int(lengths[row].sum()) for row in rows) <= 512
    assert lengths.sum() / (512 * len(rows)) > 0.98
    assert rows == pack(lengths, 512, order=shuffled(len(lengths), [7]))


def test_best_fit_takes_the_row_with_least_space() -> None:
    lengths = np.array([6, 5, 4, 3, 1])
    assert pack(lengths, 10, order=shuffled(5, None)) == [[0, 2], [1, 3, 4]]


def test_a_length_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="above the capacity 4"):
        pack(np.array([5]), 4, order=shuffled(1, None))
