"""Which numbers have arrived, against a set of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.telemetry.packing import ranges

numbers = st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=8)


@given(numbers)
def test_ranges_say_what_a_set_says(batches: list[list[int]]) -> None:
    known: set[int] = set()
    found: ranges.Ranges = []
    for batch in batches:
        seqs = np.array(batch, np.int64)
        new = ranges.unknown(found, seqs)
        assert sorted(seqs[new].tolist()) == sorted(set(batch) - known)
        found = ranges.add(found, seqs[new])
        known |= set(batch)
        assert {number for first, last in found for number in range(first, last + 1)} == known
        assert all(above[0] > below[1] + 1 for below, above in pairwise(found))


def test_complete_up_to_the_first_hole() -> None:
    assert ranges.complete_to([]) == 0
    assert ranges.complete_to([[1, 7], [9, 20]]) == 7
