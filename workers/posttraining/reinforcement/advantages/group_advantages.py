"""Advantages of groups of answers to the same prompt.

Pure functions of numbers. Shapes: N answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.contracts.specs.finetuning.reinforcement import Algorithm

Floats = NDArray[np.float64]
EPSILON = 1e-6  # added to standard deviations
# of the adaptive penalty: the largest relative error, and answers per e-fold
_KL_ERROR, _KL_HORIZON = 0.2, 10_000


def group_advantages(
    rewards_N: Sequence[float] | Floats,
    groups_N: Sequence[int] | NDArray[np.int64],
    algorithm: Algorithm,
    *,
    tokens_N: Sequence[int] | NDArray[np.int64],
) -> Floats:
    """Each answer's advantage, fp64 `[N]`, from the rewards of its group.

    With mean and standard deviation (ddof 1) of a group: `grpo` and `dapo` (r - mean) / (std +
    EPSILON) (arXiv 2402.03300), `dr_grpo` r - mean (2503.20783), `rloo` r minus the mean of the
    others (2402.14740), `reinforce_pp` r - mean, whitened over all tokens (2501.03262, with
    baseline). An answer alone in its group has advantage 0.
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    groups = np.asarray(groups_N, dtype=np.int64)
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        mine = groups == group
        values = rewards[mine]
        if len(values) < 2:
            continue
        centered = values - values.mean()
        if algorithm in ("grpo", "dapo"):
            centered = centered / (values.std(ddof=1) + EPSILON)
        elif algorithm == "rloo":
            centered = centered * len(values) / (len(values) - 1)
        out[mine] = centered
    return whiten(out, tokens_N) if algorithm == "reinforce_pp" else out


def whiten(values_N: Floats, tokens_N: Sequence[int] | NDArray[np.int64]) -> Floats:
    """Mean 0 and standard deviation 1 (ddof 1) over tokens, each with its answer's value."""
    tokens = np.asarray(tokens_N, dtype=np.float64)
    total = tokens.sum()
    if total < 2:
        return np.zeros_like(values_N)
    mean = (values_N * tokens).sum() / total
    variance = (tokens * (values_N - mean) ** 2).sum() / (total - 1)
    whitened: Floats = (values_N - mean) / (np.sqrt(variance) + EPSILON)
    return whitened


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards are all equal, so that nothing can be learned from it."""
    return all(each == rewards[0] for each in rewards)


def overlong_penalty(tokens: int, *, longest: int) -> float:
    """DAPO's soft penalty (arXiv 2503.14476, equation 13): from 0 to -1 over the last fifth of the
    longest answer.
    """
    buffer = max(1, longest // 5)
    return -max(0.0, min(1.0, (tokens - (longest - buffer)) / buffer))


def adapted_coefficient(
    coefficient: float, divergence: float, target: float, *, answers: int
) -> float:
    """The penalty's coefficient after `answers` answers of mean `divergence` per token.

    coefficient (1 + clip(divergence / target - 1, ±0.2) answers / 10000) (arXiv 1909.08593,
    section 2.2).
    """
    error = max(-_KL_ERROR, min(_KL_ERROR, divergence / target - 1))
    return coefficient * (1 + error * answers / _KL_HORIZON)
