"""The loop over both problems: learn, record, repeat. Does not know where points go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from workers.posttraining.solved_problems.bandit import BanditProblem
from workers.posttraining.solved_problems.walk import WalkProblem


class Points(Protocol):
    """Where each step's numbers go."""

    def point(self, *, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Record one step."""


def train(points: Points, *, steps: int, seed: int, seconds: float = 0.0) -> dict[str, float]:
    """Train for `steps` steps; the metrics of the last one. Equal seeds give equal numbers.

    The steps are spread over at least `seconds`, so that people can follow the curves.
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    walk = WalkProblem(np.random.default_rng(seed))
    bandit = BanditProblem(torch.Generator().manual_seed(seed))
    values: dict[str, float] = {}
    for step in range(1, steps + 1):
        values = {**walk.step(step), **bandit.step(step)}
        points.point(step=step, tokens=0, values=values)
        if step == 1 or step % 50 == 0 or step == steps:
            print(
                f"step {step}/{steps}  value error {values['walk/error/0.95']:.4f}  "
                f"bandit objective {values['bandit/objective/k1_reward']:.6f}",
                flush=True,
            )
        time.sleep(max(0.0, started + seconds * step / steps - time.monotonic()))
    return values
