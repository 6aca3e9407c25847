"""Generalized advantage estimation over the tokens of answers.

Pure functions of numbers. Shapes: N answers, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_EPSILON = 1e-8  # added to variances


def gae(
    rewards_NT: Floats, values_NT: Floats, mask_NT: NDArray[np.bool_], *, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Advantages and returns, `[N, T]`; 0 where the mask is false.

    delta = r + gamma V' - V; A = delta + gamma lam A'; the return is A + V (arXiv 1506.02438,
    equation 16). A token outside the mask passes on V' and A' of the tokens after it; after an
    answer's last token both are 0.
    """
    rows, tokens = rewards_NT.shape
    advantages = np.zeros((rows, tokens))
    value, advantage = np.zeros(rows), np.zeros(rows)
    for at in range(tokens - 1, -1, -1):
        mask = mask_NT[:, at]
        delta = rewards_NT[:, at] + gamma * value - values_NT[:, at]
        advantage = np.where(mask, delta + gamma * lam * advantage, advantage)
        value = np.where(mask, values_NT[:, at], value)
        advantages[:, at] = np.where(mask, advantage, 0.0)
    return advantages, np.where(mask_NT, advantages + values_NT, 0.0)


def whiten(values_NT: Floats, mask_NT: NDArray[np.bool_]) -> Floats:
    """Mean 0 and variance 1 (ddof 1) over the mask; 0 outside it, and of a single token."""
    chosen = values_NT[mask_NT]
    if len(chosen) < 2:
        return np.zeros_like(values_NT)
    whitened = (values_NT - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + _EPSILON)
    return np.where(mask_NT, whitened, 0.0)


def explained_variance(values: Floats, returns: Floats) -> float:
    """1 - Var(returns - values) / Var(returns); 0 if all returns are equal."""
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0


def padded(parts: Sequence[Sequence[float]]) -> tuple[Floats, NDArray[np.bool_]]:
    """Lists of different lengths as `[N, T]` with zeros at the end, and the mask of numbers."""
    longest = max(map(len, parts), default=0)
    out, mask = np.zeros((len(parts), longest)), np.zeros((len(parts), longest), dtype=bool)
    for row, numbers in enumerate(parts):
        out[row, : len(numbers)] = numbers
        mask[row, : len(numbers)] = True
    return out, mask
