"""A correction of step times near measured runs, from the residuals of the calibrated formulas.

Kriging (Gaussian-process regression) of log residuals over a few coordinates of a plan. Kernels,
drivers and host loops deviate at certain shapes from any smooth formula; measured runs show it.
Does not depend on formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.terms import Column, declare_inputs, term

Floats = NDArray[np.float64]

# correlation length of each coordinate in doublings, fitted to the runs of docs/planner-accuracy.md
LENGTHS = {"tp": 0.5, "rank_tokens": 1.5, "hidden": 0.8, "dp": 5.0, "pp": 5.0, "seq_len": 4.0}
# share of the residuals' variance that a second run at the same point does not repeat
NUGGET = 0.08
LIMIT = 0.4  # of a residual, in log: limits the effect of an outlier on its neighbors
_OUTLIER = 8.0  # times the expected error: from there on a run is an outlier and counts less
_OUTLIER_NUGGET = 0.3
_MIN_EXPLAINED = 0.2  # share of a run's variance that neighbors must explain to call it an outlier
_USUAL = 0.03  # residual scale below which well-fitting runs do not make others outliers
_PRIOR_RUNS = 3  # of that scale, because a few runs do not determine it
_GROUP_DISTANCE = 1e3  # in coordinates: runs of other groups have no effect
MOST_POINTS = 256

declare_inputs(
    "runs", "calibration: the measured runs near which plans are corrected", "correction_runs"
)
declare_inputs("", "calibration: which group of runs a plan belongs to", "correction_key")


@dataclass(frozen=True)
class Runs:
    """Measured runs of one or several groups: `points` (m, k), `weights`, group `keys` (m,).

    `float(runs)` is their number.
    """

    points: Floats
    weights: Floats
    keys: Floats

    def __float__(self) -> float:
        return float(len(self.weights))


NO_CORRECTION: dict[str, Any] = {
    "correction_runs": np.asarray(
        Runs(np.zeros((0, len(LENGTHS))), np.zeros(0), np.zeros(0)), object
    ),
    "correction_key": np.asarray(0.0),
    "peer_norm": np.asarray(0.0),
}


def coordinates(columns: Mapping[str, Any], n: int) -> Floats:
    """`(n, k)`: log2 of each coordinate over its correlation length."""
    return np.stack(
        [np.broadcast_to(np.log2(columns[name]) / length, n) for name, length in LENGTHS.items()], 1
    )


def similarity(points: Floats, others: Floats) -> Floats:
    """`(n, m)`: exp(-distance), the exponential kernel of rough functions."""
    apart = np.zeros((len(points), len(others)))
    for axis in range(points.shape[1]):
        apart += np.abs(points[:, axis, None] - others[None, :, axis])
    return np.asarray(np.exp(-apart))


@dataclass(frozen=True)
class Kriging:
    """Distinct `points` (m, k), `weights` and `noise` (share of variance) (m,), `scale` in log.

    Per run (n,): the leave-one-out log error `left_out`, and the share of variance that the other
    runs leave `open`.
    """

    points: Floats
    weights: Floats
    noise: Floats
    scale: float
    left_out: Floats
    open: Floats


def krige(
    points: Floats, residuals: Floats, leverage: Floats, spreads: Floats | None = None
) -> Kriging:
    """From the runs' points (n, k), and their log residuals and leverages (n,) in the fit.

    Runs at one point count once, with their mean residual. Without its run in the fit, a residual
    is r / (1 - leverage). Runs far from their neighbors' prediction count less (robust kriging).
    So do runs with settings that are not stated: `spreads` (n,) are the log errors of not knowing
    them, which nearby plans with other settings do not share.
    """
    alone = residuals / (1 - np.minimum(leverage, 0.7))
    usual = np.full(_PRIOR_RUNS, _USUAL / 1.4826)
    scale = max(0.01, 1.4826 * float(np.median(np.concatenate([np.abs(alone), usual]))))
    near = similarity(points, points)
    unstated = np.zeros(len(points)) if spreads is None else (spreads / scale) ** 2
    own = NUGGET + unstated
    noise, errors, open_share = own, alone, np.ones(len(points))
    for _ in range(3):
        expected, errors = _left_out(near, noise, np.clip(alone, -LIMIT, LIMIT), alone)
        open_share = np.maximum(expected - noise, 0) + NUGGET
        outlier_ratio = (
            np.abs(errors) / (scale * np.sqrt(open_share)) * min(scale / _USUAL, 1) / _OUTLIER
        )
        outlier_ratio = outlier_ratio * np.clip((1 + NUGGET - open_share) / _MIN_EXPLAINED, 0, 1)
        noise = own + np.where(outlier_ratio > 1, _OUTLIER_NUGGET * outlier_ratio**2, 0.0)
    distinct, which, counts = np.unique(
        points.round(6), axis=0, return_inverse=True, return_counts=True
    )
    which = which.reshape(-1)
    precision = np.bincount(which, 1 / noise)
    mean = np.bincount(which, np.clip(residuals, -LIMIT, LIMIT) / noise) / precision
    if len(distinct) > MOST_POINTS:
        rows = np.sort(np.argsort(-counts, kind="stable")[:MOST_POINTS])
        distinct, mean, precision = distinct[rows], mean[rows], precision[rows]
    weights = np.linalg.solve(similarity(distinct, distinct) + np.diag(1 / precision), mean).astype(
        np.float64
    )
    return Kriging(distinct, weights, np.asarray(1 / precision, float), scale, errors, open_share)


def _left_out(
    near: Floats, noise: Floats, clipped: Floats, residuals: Floats
) -> tuple[Floats, Floats]:
    """Expected variance of each run's leave-one-out error (relative), and the error itself."""
    inverse = np.linalg.inv(near + np.diag(noise))
    return np.asarray(1 / np.diag(inverse)), residuals - clipped + (inverse @ clipped) / np.diag(
        inverse
    )


def unexplained(targets: Floats, points: Floats, noise: Floats) -> Floats:
    """Share of the residuals' variance that the runs leave open at each target `(n,)`.

    Above 1 far from all runs.
    """
    if not len(points):
        return np.full(len(targets), 1 + NUGGET)
    covered = np.linalg.inv(similarity(points, points) + np.diag(noise))
    near = similarity(targets, points)
    return np.asarray(
        np.maximum(1 + NUGGET - np.einsum("nm,mk,nk->n", near, covered, near), NUGGET / 2)
    )


def columns(groups: Sequence[tuple[Floats, Floats]], keys: Sequence[int]) -> dict[str, Any]:
    """The input columns of `correction`: the runs of all groups, and the group of each plan."""
    if not any(len(points) for points, _ in groups):
        return dict(NO_CORRECTION)
    points = np.concatenate([points for points, _ in groups])
    owner = np.repeat(np.arange(len(groups)), [len(points) for points, _ in groups]).astype(float)
    runs = Runs(points, np.concatenate([weights for _, weights in groups]), owner)
    return {
        "correction_runs": np.asarray(runs, object),
        "correction_key": np.asarray(keys[0] if len(set(keys)) == 1 else keys, float),
        "peer_norm": np.asarray(0.0),
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
    """The factor on a step time, `(n,)`."""
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
    shape = np.broadcast_shapes(*(column.shape for column in (*values.values(), correction_key)))
    flat = {name: np.broadcast_to(column, shape).reshape(-1) for name, column in values.items()}
    key = np.broadcast_to(correction_key, shape).reshape(-1)
    targets = np.column_stack([coordinates(flat, key.size), key * _GROUP_DISTANCE])
    rows, which = _distinct(targets)
    log = (
        similarity(targets[rows], np.column_stack([runs.points, runs.keys * _GROUP_DISTANCE]))
        @ runs.weights
    )
    return np.asarray(np.exp(np.clip(log, -LIMIT, LIMIT))[which].reshape(shape))


def _distinct(points: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The row of each distinct point, and the index of each row's point; a search has few."""
    if len(points) < 512:
        rows = np.arange(len(points))
        return rows, rows
    code = np.zeros(len(points), np.int64)
    for axis in range(points.shape[1]):
        code = code * 1_000_003 + np.round(points[:, axis] * 2**20).astype(np.int64)
    _, rows, which = np.unique(code, return_index=True, return_inverse=True)
    return rows, which.reshape(-1)
