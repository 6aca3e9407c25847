"""Which runs calibrate and which are held out. Knows no error and no formula."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.calibration.measurements import Pair


@dataclass(frozen=True)
class Split:
    """`name` tells the seed or what was left out."""

    name: str
    calibrating: list[Pair]
    held_out: list[Pair]


def random_splits(pairs: Sequence[Pair], calibrating: int, seeds: Sequence[int]) -> Iterator[Split]:
    """A number of runs drawn without replacement, the rest held out, for each seed."""
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(pairs))
        chosen = [pairs[row] for row in order]
        yield Split(f"seed {seed}", chosen[:calibrating], chosen[calibrating:])


def leave_one_out(pairs: Sequence[Pair], key: Callable[[Pair], Hashable]) -> Iterator[Split]:
    """All runs that share one value of `key` held out, all others calibrating, for each value."""
    for value in sorted({key(pair) for pair in pairs}, key=str):
        yield Split(
            str(value),
            [pair for pair in pairs if key(pair) != value],
            [pair for pair in pairs if key(pair) == value],
        )
