"""Splits of runs into calibrating and held-out ones.

Does not depend on errors or formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.calibration.measurements import Pair


@dataclass(frozen=True)
class Split:
    """Calibrating and held-out runs; `name` is the seed or the left-out value."""

    name: str
    calibrating: list[Pair]
    held_out: list[Pair]


def random_splits(pairs: Sequence[Pair], calibrating: int, seeds: Sequence[int]) -> Iterator[Split]:
    """For each seed, `calibrating` runs drawn without replacement; the rest is held out."""
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(pairs))
        chosen = [pairs[row] for row in order]
        yield Split(f"seed {seed}", chosen[:calibrating], chosen[calibrating:])


def leave_one_out(pairs: Sequence[Pair], key: Callable[[Pair], Hashable]) -> Iterator[Split]:
    """For each value of `key`, its runs held out and all others calibrating."""
    for value in sorted({key(pair) for pair in pairs}, key=str):
        yield Split(
            str(value),
            [pair for pair in pairs if key(pair) != value],
            [pair for pair in pairs if key(pair) == value],
        )
