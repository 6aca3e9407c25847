"""Bounded, robust least squares with a prior: Levenberg-Marquardt on a few parameters.

Does not depend on models or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# degrees of freedom of the t distribution of residuals: an outlier of 10 spreads weighs 1/20
FREEDOM = 4.0


@dataclass(frozen=True)
class Solution:
    """Parameters `x` (k,), residuals (n,), their robust `spread`, the covariance (k, k).

    Per row (n,): the `variance` from the covariance, and the `leverage`, the share of its own
    residual that the fit removed, 0 to 1.
    """

    x: Floats
    residuals: Floats
    spread: float
    covariance: Floats
    variance: Floats
    leverage: Floats


def solve(
    residuals: Callable[[Floats], Floats],
    start: Floats,
    low: Floats,
    high: Floats,
    sigma: Floats,
    *,
    floor: float = 0.01,
    spread: float = 0.05,
    usual: float = 0.03,
    usual_rows: float = 4.0,
    rounds: int = 40,
    step: float = 1e-3,
) -> Solution:
    """Minimizes sum rho(r(x) / s) + sum ((x - start) / sigma)^2 within bounds.

    x, `start`, `low`, `high` and `sigma` are `(k,)`, residuals `(n,)`.

    rho is Student's t with 4 degrees of freedom, as iterated weights 5 / (4 + (r/s)^2): an outlier
    of 10 s weighs 1/20. s is estimated during the iteration, starting at `spread`, never below
    `floor`. `usual` is a prior for s with the weight of `usual_rows` rows, because one run, however
    well fitted, does not determine the spread.
    """

    def spread_of(r: Floats) -> float:
        own, rows = _spread(r, len(start)), r.size
        return max(
            floor, float(np.sqrt((rows * own**2 + usual_rows * usual**2) / (rows + usual_rows)))
        )

    x, damping = start.copy(), 1e-2
    r = residuals(x)
    jacobian = jacobian_of(residuals, x, r, step, low, high)
    for iteration in range(rounds):
        weights = (FREEDOM + 1) / (FREEDOM + (r / spread) ** 2) / spread**2
        gradient = jacobian.T @ (weights * r) + (x - start) / sigma**2
        normal = (jacobian.T * weights) @ jacobian + np.diag(1 / sigma**2)
        cost = _cost(r, x, start, sigma, spread)
        better = False
        for _ in range(8):
            free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
            move = np.zeros_like(x)
            block = np.ix_(free, free)
            move[free] = -np.linalg.solve(
                normal[block] + damping * np.diag(np.diag(normal)[free]), gradient[free]
            )
            candidate = np.clip(x + np.clip(move, -1.0, 1.0), low, high)
            new_r = residuals(candidate)
            if np.all(np.isfinite(new_r)) and _cost(new_r, candidate, start, sigma, spread) < cost:
                better = True
                break
            damping *= 4
        if not better:
            break
        shift = float(np.abs(candidate - x).max())
        x, r, damping = candidate, new_r, max(damping / 5, 1e-9)
        if iteration % 2:
            spread = spread_of(r)
        jacobian = jacobian_of(residuals, x, r, step, low, high)
        if shift < 1e-4:
            break
    spread = spread_of(r)
    weights = (FREEDOM + 1) / (FREEDOM + (r / spread) ** 2) / spread**2
    covariance = np.asarray(
        np.linalg.inv((jacobian.T * weights) @ jacobian + np.diag(1 / sigma**2)), np.float64
    )
    variance = np.asarray(np.einsum("nk,kl,nl->n", jacobian, covariance, jacobian), np.float64)
    return Solution(
        x, r, spread, covariance, variance, np.clip(weights * variance, 0.0, 1.0).astype(np.float64)
    )


def _cost(r: Floats, x: Floats, start: Floats, sigma: Floats, spread: float) -> float:
    robust = (FREEDOM + 1) / 2 * np.log1p((r / spread) ** 2 / FREEDOM).sum()
    return float(2 * robust + (((x - start) / sigma) ** 2).sum())


def _spread(r: Floats, parameters: int) -> float:
    """Robust spread: scaled median absolute residual, corrected for parameters per row."""
    n = r.size
    return (
        float(1.4826 * np.median(np.abs(r)) * np.sqrt(n / max(n - 0.5 * min(parameters, n), 1)))
        if n
        else 0.0
    )


def jacobian_of(
    residuals: Callable[[Floats], Floats],
    x: Floats,
    r: Floats,
    step: float,
    low: Floats,
    high: Floats,
) -> Floats:
    """`(n, k)` derivatives of the residuals `r` at `x`, by differences inside the bounds."""
    columns = []
    for index in range(x.size):
        moved = x.copy()
        delta = step if x[index] + step <= high[index] else -step
        moved[index] += delta
        columns.append((residuals(moved) - r) / delta)
    return np.stack(columns, 1) if columns else np.zeros((r.size, 0))
