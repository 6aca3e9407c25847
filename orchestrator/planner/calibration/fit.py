"""Fits the parameters to measured step times and peaks, per device and framework.

Has no formulas; each term declares the parameters it depends on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import orchestrator.planner.model.all_terms  # noqa: F401  registers the terms
from orchestrator.planner.calibration.doubtful import find_doubts
from orchestrator.planner.calibration.least_squares import Floats, Solution, solve
from orchestrator.planner.calibration.measured_parameters import SPREAD, measured_parameters
from orchestrator.planner.calibration.measurements import (
    Pair,
    out_of_memory,
    peaks,
    read_measurements,
    reports_reserved,
    step_times,
)
from orchestrator.planner.model.calibration_result import Calibration, Group
from orchestrator.planner.model.coverage import coverage_of
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.kriging import (
    LENGTHS,
    NO_CORRECTION,
    Kriging,
    coordinates,
    krige,
)
from orchestrator.planner.model.parameters import PARAMETERS, defaults, fixed_columns
from orchestrator.planner.model.profiles import Published, published
from orchestrator.planner.model.terms import TERMS, Table, leaves
from orchestrator.planner.model.time.intervals import FAR, UNKNOWN, Z80

__all__ = ["Calibration", "Group", "fit"]

# parameters that matter only if a run has the switch
_SWITCHES = {"compiled_traffic": "compiled", "async_tp_exposed": "async_tp"}
# prior for few runs: this many runs with the usual error of calibrated predictions
_PRIOR_RUNS = 5
_KNOWN = 0.05  # log error of a run whose settings are all stated; others count less
# factor on the priors of memory: published peaks of the framework support its defaults
_MEMORY_NARROWING = {"fsdp2": 0.4}
_PRIOR_ERROR = 0.03
# smallest factor on the priors if published runs support the defaults and agree with these runs
_NARROWEST = 0.3
_TRUSTED_RUNS = 10  # from about this many runs on, the runs outweigh the published ones
# far from all runs, errors exceed the residuals; from left-out widths and models of published runs
_FAR_SCALES = 1.7


def fit(measurements: Iterable[Any], *, start: Mapping[str, float] | None = None) -> Calibration:
    """From measurement lines or `(request, measured)` pairs.

    `start` replaces values of the default profile. `left_out` lists unusable lines, `doubtful` runs
    that are impossible or contradict others.
    """
    usable = read_measurements(measurements)
    doubts = find_doubts(usable.pairs)
    scales = doubts.scales * [
        _KNOWN / np.hypot(_KNOWN, pair[0].open_spread) for pair in usable.pairs
    ]
    groups: dict[tuple[str, str], list[tuple[Pair, float]]] = {}
    for pair, scale in zip(usable.pairs, scales.tolist(), strict=True):
        if scale > 0:
            key = (pair[0].entry.name, pair[0].framework.name)
            groups.setdefault(key, []).append((pair, scale))
    return Calibration(
        [
            _fit_group(
                *key,
                [pair for pair, _ in own],
                start or {},
                np.array([scale for _, scale in own]),
            )
            for key, own in sorted(groups.items())
        ],
        usable.left_out,
        doubtful=doubts.to_dicts(usable.pairs),
    )


def _fit_group(
    device: str,
    framework: str,
    pairs: Sequence[Pair],
    given: Mapping[str, float],
    scales: Floats,
) -> Group:
    requests = [request for request, _ in pairs]
    prior_runs = published(framework, requests[0].entry)
    measured = measured_parameters(pairs)
    start = defaults(framework, requests[0].entry) | measured | dict(given)
    columns = {**NO_CORRECTION, **{name: np.asarray(value) for name, value in start.items()}}
    group: dict[str, Any] = {
        "device": device,
        "framework": framework,
        "rows": len(pairs),
        "values": dict(start),
    }

    table = table_of(requests, columns)
    time = step_times(pairs, table)
    timed = np.flatnonzero(np.isfinite(time))
    if timed.size:
        table = table.take(timed)
        names, solution = _fit_term(
            table,
            "step_time_s",
            time[timed],
            start,
            prior_runs,
            measured_names=measured,
            scales=scales[timed],
        )
        group["values"] |= dict(zip(names, np.exp(solution.x).tolist(), strict=True))
        points = coordinates({name: table.column(name) for name in LENGTHS}, timed.size)
        coverage = coverage_of(table)
        unstated = np.array([requests[row].open_spread for row in timed])
        kriging = krige(points, -solution.residuals, solution.leverage, unstated)
        group |= {
            "names": names,
            "covariance": solution.covariance.tolist(),
            "points": kriging.points.tolist(),
            "weights": kriging.weights.tolist(),
            "noise": kriging.noise.tolist(),
            "scale": kriging.scale,
            "widening": _widening(kriging, solution),
            "far": _far(kriging),
            "timed": int(timed.size),
            "ranges": dict(coverage.ranges),
            "kinds": dict(coverage.kinds),
        }
    peak, failed = peaks(pairs), out_of_memory(pairs)
    rows = np.flatnonzero(np.isfinite(peak) | failed)
    if np.isfinite(peak).any():
        reserved = reports_reserved([pairs[row] for row in rows])
        table = table_of(
            [requests[row] for row in rows],
            {**columns, "reports_reserved": np.asarray(reserved, float)},
        )
        capacity = table.column("usable_bytes") if failed[rows].any() else None
        names, solution = _fit_term(
            table,
            "reported_peak_bytes" if reserved.any() else "total_bytes",
            np.where(failed[rows], np.nan, peak[rows]),
            start,
            lower_bound=capacity,
            narrowing=_MEMORY_NARROWING.get(framework, 1.0),
        )
        group["values"] |= dict(zip(names, np.exp(solution.x).tolist(), strict=True))
        group |= {"weighed": int(np.isfinite(peak).sum()), "memory_spread": solution.spread}
    return Group(**group)


def _fit_term(
    table: Table,
    term: str,
    measured: Floats,
    start: Mapping[str, float],
    prior_runs: Published | None = None,
    lower_bound: Floats | None = None,
    measured_names: Collection[str] = (),
    scales: Floats | None = None,
    narrowing: float = 1.0,
) -> tuple[list[str], Solution]:
    """Fits, in log space, every parameter that the term depends on.

    A nan in `measured` means more than `lower_bound`. Parameters in `measured_names`, which were
    measured directly, barely change. `scales` (n,) below 1 make a run count less.
    """
    unused = {name for name, switch in _SWITCHES.items() if not table.column(switch).any()}
    names = sorted((leaves(TERMS, [term]) & set(PARAMETERS)) - unused)
    parameters = [PARAMETERS[name] for name in names]
    fixed = fixed_columns(table, term, set(names))

    def residuals(x: Floats) -> Floats:
        moved = Table({**fixed, **dict(zip(names, np.exp(x), strict=True))}, table.n)
        value = moved.column(term)
        exact = np.log(value / measured) * (1.0 if scales is None else scales)
        if lower_bound is None:
            return np.asarray(exact, float)
        return np.asarray(
            np.where(np.isnan(measured), np.minimum(np.log(value / lower_bound), 0), exact), float
        )

    first = np.log(np.array([start[name] for name in names]))
    low = np.log(np.array([item.low for item in parameters]))
    high = np.log(np.array([item.high for item in parameters]))
    sigma = np.array([item.sigma for item in parameters])
    prior = sigma * narrowing * _narrowing(residuals(first), prior_runs)
    prior = np.where([name in measured_names for name in names], np.minimum(prior, SPREAD), prior)
    return names, solve(residuals, first, low, high, prior)


def _narrowing(residuals: Floats, prior_runs: Published | None) -> float:
    """A factor on the priors: small if the runs agree with the profile as the published runs do."""
    if prior_runs is None:
        return 1.0
    own, n = 1.4826 * float(np.median(np.abs(residuals))), residuals.size
    far = np.sqrt((n * own**2 + _PRIOR_RUNS * prior_runs.spread**2) / (n + _PRIOR_RUNS))
    narrowest = float(np.clip(far / UNKNOWN, _NARROWEST, 1.0))
    return 1 - (1 - narrowest) * _TRUSTED_RUNS / (n + _TRUSTED_RUNS)


def _widening(kriging: Kriging, solution: Solution) -> float:
    """The factor by which kriging intervals must widen to hold 80% of the left-out runs.

    Few runs are pulled toward the usual error. The uncertainty of the parameters counts
    separately, as in `intervals`.
    """
    n, scale = kriging.left_out.size, kriging.scale
    parameters = np.minimum(
        solution.variance / (1 - np.minimum(solution.leverage, 0.7)), UNKNOWN**2
    )
    needed = np.sqrt(np.maximum((kriging.left_out / Z80) ** 2 - parameters, 0.0) / kriging.open)
    own, usual = float(np.quantile(needed, 0.8)), _PRIOR_ERROR / Z80
    return float(np.sqrt((n * own**2 + _PRIOR_RUNS * usual**2) / (n + _PRIOR_RUNS)) / scale)


def _far(kriging: Kriging) -> float:
    """The log error far from all runs; runs far from each other show it in their own residuals."""
    apart = float(np.clip(kriging.open, 0, 1).mean()) ** 4
    return max(FAR, kriging.scale * (_FAR_SCALES - (_FAR_SCALES - 1) * apart))
