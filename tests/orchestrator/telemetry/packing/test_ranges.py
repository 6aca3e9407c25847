"""Ranges of arrived numbers, compared with a set."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.telemetry.packing import ranges

numbers = st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=8)


@given(numbers)
def test_ranges_equal_a_set(batches: list[list[int]]) -> None:
    known: set[int] = set()
    current: ranges.Ranges = []
    for batch in batches:
        seqs = np.array(batch, np.int64)
        new = ranges.unknown(current, seqs)
        assert sorted(seqs[new].tolist()) == sorted(set(batch) - known)
        current = ranges.add(current, seqs[new])
        known |= set(batch)
        assert {number for first, last in current for number in range(first, last + 1)} == known
        assert all(above[0] > below[1] + 1 for below, above in pairwise(current))


def test_complete_up_to_the_first_gap() -> None:
    assert ranges.complete_to([]) == 0
    assert ranges.complete_to([[1, 7], [9, 20]]) == 7
