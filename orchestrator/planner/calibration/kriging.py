"""What measured runs still say when the formulas have said all: a correction near them, none far
from them.

Kriging (Gaussian-process regression) of log residuals over a few coordinates of a plan. Kernels,
drivers and host loops
have habits at certain shapes that no smooth formula has; a run measured at a shape tells them.
Knows no formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.terms import Column, given, term

Floats = NDArray[np.float64]

# doublings of each over which residuals lose 1 - 1/e of their likeness; found on the runs of
# docs/planner-accuracy.md
LENGTHS = {"tp": 0.5, "rank_tokens": 1.5, "hidden": 0.8, "dp": 5.0, "pp": 5.0, "seq_len": 4.0}
# share of the residuals' variance that a second run at the same point would not repeat
NUGGET = 0.08
LIMIT = 0.4  # of a residual, in log: an outlier must not move its neighbours further
_ODD = 8.0  # times what was expected: from there on a run counts as an odd one, and less
_ODD_NUGGET = 0.3
_NEIGHBOURED = 0.2  # share of a run's variance that its neighbours tell, for them to call it odd
_USUAL = 0.03  # scale of residuals below which runs that agree with formulas do not make others odd
_PRIOR_RUNS = 3  # of that scale: a few runs do not tell how far others lie from the formulas
_APART = 1e3
MOST_POINTS = 256

given("runs", "calibration: the measured runs near which plans are corrected", "correction_runs")
given("", "calibration: which group of runs a plan belongs to", "correction_key")


@dataclass(frozen=True)
class Runs:
    """Measured runs of one or several groups: `points` (m, k), `weights`, group `keys` (m,).

    As a number: how many.
    """

    points: Floats
    weights: Floats
    keys: Floats

    def __float__(self) -> float:
        return float(len(self.weights))


NONE: dict[str, Any] = {
    "correction_runs": np.asarray(
        Runs(np.zeros((0, len(LENGTHS))), np.zeros(0), np.zeros(0)), object
    ),
    "correction_key": np.asarray(0.0),
}


def coordinates(columns: Mapping[str, Any], n: int) -> Floats:
    """`(n, k)`: log2 of each coordinate over its length."""
    return np.stack(
        [np.broadcast_to(np.log2(columns[name]) / length, n) for name, length in LENGTHS.items()], 1
    )


def likeness(points: Floats, others: Floats) -> Floats:
    """`(n, m)`: exp(-distance), the exponential kernel of rough functions."""
    apart = np.zeros((len(points), len(others)))
    for axis in range(points.shape[1]):
        apart += np.abs(points[:, axis, None] - others[None, :, axis])
    return np.asarray(np.exp(-apart))


@dataclass(frozen=True)
class Kriging:
    """Distinct `points` (m, k) with `weights` (m,), the share of variance each does not repeat
    (`noise`), the process'
    `scale` in log; of every run (n,) its leave-one-out error `left_out` in log, and the share of
    variance that the
    other runs left `open` there."""

    points: Floats
    weights: Floats
    noise: Floats
    scale: float
    left_out: Floats
    open: Floats


def krige(points: Floats, residuals: Floats, leverage: Floats) -> Kriging:
    """From the runs' places (n, k), log residuals and leverages (n,) in the fit that left them.

    Runs at one place count once, with the mean of their residuals. A residual is r / (1 - leverage)
    had its run been
    left out of the fit. Runs far from what their neighbours say are odd: they count less (a robust
    kriging).
    """
    alone = residuals / (1 - np.minimum(leverage, 0.7))
    usual = np.full(_PRIOR_RUNS, _USUAL / 1.4826)
    scale = max(0.01, 1.4826 * float(np.median(np.concatenate([np.abs(alone), usual]))))
    near = likeness(points, points)
    noise, errors, open_share = np.full(len(points), NUGGET), alone, np.ones(len(points))
    for _ in range(3):
        expected, errors = _left_out(near, noise, np.clip(alone, -LIMIT, LIMIT), alone)
        open_share = np.maximum(expected - noise, 0) + NUGGET
        oddness = np.abs(errors) / (scale * np.sqrt(open_share)) * min(scale / _USUAL, 1) / _ODD
        oddness = oddness * np.clip((1 + NUGGET - open_share) / _NEIGHBOURED, 0, 1)
        noise = np.where(oddness > 1, NUGGET + _ODD_NUGGET * oddness**2, NUGGET)
    distinct, which, counts = np.unique(
        points.round(6), axis=0, return_inverse=True, return_counts=True
    )
    which = which.reshape(-1)
    precision = np.bincount(which, 1 / noise)
    mean = np.bincount(which, np.clip(residuals, -LIMIT, LIMIT) / noise) / precision
    if len(distinct) > MOST_POINTS:
        kept = np.sort(np.argsort(-counts, kind="stable")[:MOST_POINTS])
        distinct, mean, precision = distinct[kept], mean[kept], precision[kept]
    weights = np.linalg.solve(likeness(distinct, distinct) + np.diag(1 / precision), mean).astype(
        np.float64
    )
    return Kriging(distinct, weights, np.asarray(1 / precision, float), scale, errors, open_share)


def _left_out(
    near: Floats, noise: Floats, clipped: Floats, residuals: Floats
) -> tuple[Floats, Floats]:
    """Variance expected of each run's error when the others predict it, over the process', and the
    error itself.
    """
    inverse = np.linalg.inv(near + np.diag(noise))
    return np.asarray(1 / np.diag(inverse)), residuals - clipped + (inverse @ clipped) / np.diag(
        inverse
    )


def unexplained(places: Floats, points: Floats, noise: Floats) -> Floats:
    """Share of the residuals' variance that the runs leave open at each place `(n,)`; above 1 far
    from all of them.
    """
    if not len(points):
        return np.full(len(places), 1 + NUGGET)
    covered = np.linalg.inv(likeness(points, points) + np.diag(noise))
    near = likeness(places, points)
    return np.asarray(
        np.maximum(1 + NUGGET - np.einsum("nm,mk,nk->n", near, covered, near), NUGGET / 2)
    )


def columns(groups: Sequence[tuple[Floats, Floats]], keys: Sequence[int]) -> dict[str, Any]:
    """Columns of `correction` for plans of several groups: all their runs, and the group of each
    plan.
    """
    if not any(len(points) for points, _ in groups):
        return NONE
    points = np.concatenate([points for points, _ in groups])
    owner = np.repeat(np.arange(len(groups)), [len(points) for points, _ in groups]).astype(float)
    runs = Runs(points, np.concatenate([weights for _, weights in groups]), owner)
    return {
        "correction_runs": np.asarray(runs, object),
        "correction_key": np.asarray(keys[0] if len(set(keys)) == 1 else keys, float),
    }


@term(
    "",
    "exp(sum over measured runs of weight x exp(-distance to it)), within bounds; 1 without "
    "calibration",
    "kriging of residuals, Matheron 1963; exponential kernel over log2 of tp, tokens, hidden, dp, "
    "pp, seq_len",
)
def correction(
    correction_runs: Column,
    correction_key: Column,
    tp: Column,
    rank_tokens: Column,
    hidden: Column,
    dp: Column,
    pp: Column,
    seq_len: Column,
) -> Column:
    runs: Runs = correction_runs.item()
    if not len(runs.weights):
        return np.asarray(1.0)
    values = {
        "tp": tp,
        "rank_tokens": rank_tokens,
        "hidden": hidden,
        "dp": dp,
        "pp": pp,
        "seq_len": seq_len,
    }
    shape = np.broadcast_shapes(*(each.shape for each in (*values.values(), correction_key)))
    flat = {name: np.broadcast_to(each, shape).reshape(-1) for name, each in values.items()}
    key = np.broadcast_to(correction_key, shape).reshape(-1)
    here = np.column_stack([coordinates(flat, key.size), key * _APART])
    places, which = _distinct(here)
    log = likeness(here[places], np.column_stack([runs.points, runs.keys * _APART])) @ runs.weights
    return np.asarray(np.exp(np.clip(log, -LIMIT, LIMIT))[which].reshape(shape))


def _distinct(points: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One row for each different point, and which of them every row is; a search has few different
    ones.
    """
    if len(points) < 512:
        every = np.arange(len(points))
        return every, every
    code = np.zeros(len(points), np.int64)
    for axis in range(points.shape[1]):
        code = code * 1_000_003 + np.round(points[:, axis] * 2**20).astype(np.int64)
    _, places, which = np.unique(code, return_index=True, return_inverse=True)
    return places, which.reshape(-1)
