"""Fits the parameters to measured runs: step times and peaks, group by group of device and
framework.

Knows which parameters a term rests on; the formulas are in the terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import orchestrator.planner.model.all_terms  # noqa: F401  registers the terms
from orchestrator.planner.calibration.coverage import basis_of
from orchestrator.planner.calibration.kriging import LENGTHS, NONE, Kriging, coordinates, krige
from orchestrator.planner.calibration.least_squares import Floats, Solution, solve
from orchestrator.planner.calibration.measured_parameters import SPREAD, told_values
from orchestrator.planner.calibration.measurements import (
    Pair,
    peaks,
    ran_out,
    read_lines,
    step_times,
)
from orchestrator.planner.calibration.result import Calibration, Group
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.parameters import PARAMETERS, defaults, fixed_columns
from orchestrator.planner.model.profiles import Published, published
from orchestrator.planner.model.terms import TERMS, Table, leaves
from orchestrator.planner.model.time.intervals import FAR, UNKNOWN, Z80

__all__ = ["Calibration", "Group", "fit"]

# what a few runs cannot tell: as many runs with the error that calibrated predictions usually have
_PRIOR_RUNS = 5
_PRIOR_ERROR = 0.03
# of the parameters' priors, at least, where published runs stand behind the default and these runs
# are like them
_NARROWEST, _TRUSTED_RUNS = 0.3, 10  # by that many runs and more the runs themselves are believed
# far from all runs errors are larger than residuals among them; left-out widths and models of
# published runs gave it
_FAR_SCALES = 1.7


def fit(measurements: Iterable[Any]) -> Calibration:
    """From measurement lines, or `(request, measured)` pairs.

    Lines that cannot be used are told in `left_out`.
    """
    found = read_lines(measurements)
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in found.pairs:
        groups.setdefault((pair[0].entry.name, pair[0].framework.name), []).append(pair)
    return Calibration(
        [_fit_group(*key, pairs) for key, pairs in sorted(groups.items())], found.left_out
    )


def _fit_group(device: str, framework: str, pairs: Sequence[Pair]) -> Group:
    start = defaults(framework, pairs[0][0].entry)
    requests, known = [request for request, _ in pairs], published(framework, pairs[0][0].entry)
    told = told_values(pairs)
    start |= told
    given = {**NONE, **{name: np.asarray(value) for name, value in start.items()}}
    found: dict[str, Any] = {
        "device": device,
        "framework": framework,
        "rows": len(pairs),
        "values": dict(start),
    }

    table = table_of(requests, given)
    time = step_times(pairs, table)
    timed = np.flatnonzero(np.isfinite(time))
    if timed.size:
        table = table.take(timed)
        names, solution = _fit_term(table, "step_time_s", time[timed], start, known, told=told)
        found["values"] |= dict(zip(names, np.exp(solution.x).tolist(), strict=True))
        columns = {name: table.column(name) for name in LENGTHS}
        covered = basis_of(table)
        kriging = krige(coordinates(columns, timed.size), -solution.residuals, solution.leverage)
        found |= {
            "names": names,
            "covariance": solution.covariance.tolist(),
            "points": kriging.points.tolist(),
            "weights": kriging.weights.tolist(),
            "noise": kriging.noise.tolist(),
            "scale": kriging.scale,
            "widening": _widening(kriging, solution),
            "far": _far(kriging),
            "timed": int(timed.size),
            "ranges": dict(covered.ranges),
            "kinds": dict(covered.kinds),
        }
    held, failed = peaks(pairs), ran_out(pairs)
    weighed = np.flatnonzero(np.isfinite(held) | failed)
    if np.isfinite(held).any():
        table = table_of([requests[row] for row in weighed], given)
        capacity = table.column("usable_bytes") if failed[weighed].any() else None
        names, solution = _fit_term(
            table,
            "total_bytes",
            np.where(failed[weighed], np.nan, held[weighed]),
            start,
            least=capacity,
        )
        found["values"] |= dict(zip(names, np.exp(solution.x).tolist(), strict=True))
        found |= {"weighed": int(np.isfinite(held).sum()), "memory_spread": solution.spread}
    return Group(**found)


def _fit_term(
    table: Table,
    term: str,
    measured: Floats,
    start: Mapping[str, float],
    known: Published | None = None,
    least: Floats | None = None,
    told: Collection[str] = (),
) -> tuple[list[str], Solution]:
    """Fits every parameter the term rests on, in log space. Where nothing was measured it was more
    than `least`.

    Parameters that were `told`, measured by themselves, hardly move.
    """
    names = sorted(leaves(TERMS, [term]) & set(PARAMETERS))
    chosen = [PARAMETERS[name] for name in names]
    fixed = fixed_columns(table, term, set(names))

    def residuals(x: Floats) -> Floats:
        moved = Table({**fixed, **dict(zip(names, np.exp(x), strict=True))}, table.n)
        value = moved.column(term)
        exact = np.log(value / measured)
        if least is None:
            return np.asarray(exact, float)
        return np.asarray(
            np.where(np.isnan(measured), np.minimum(np.log(value / least), 0), exact), float
        )

    first = np.log(np.array([start[name] for name in names]))
    low, high = (
        np.log(np.array([each.low for each in chosen])),
        np.log(np.array([each.high for each in chosen])),
    )
    sigma = np.array([each.sigma for each in chosen])
    prior = sigma * _narrowing(residuals(first), known)
    prior = np.where([name in told for name in names], np.minimum(prior, SPREAD), prior)
    return names, solve(residuals, first, low, high, prior)


def _narrowing(residuals: Floats, known: Published | None) -> float:
    """How much nearer to its default a parameter is expected: runs that lie as far from the profile
    as the published
    ones are of devices like theirs, runs that lie further may be of any."""
    if known is None:
        return 1.0
    own, n = 1.4826 * float(np.median(np.abs(residuals))), residuals.size
    far = np.sqrt((n * own**2 + _PRIOR_RUNS * known.spread**2) / (n + _PRIOR_RUNS))
    narrowest = float(np.clip(far / UNKNOWN, _NARROWEST, 1.0))
    return 1 - (1 - narrowest) * _TRUSTED_RUNS / (n + _TRUSTED_RUNS)


def _widening(kriging: Kriging, solution: Solution) -> float:
    """How much wider than kriging says 80% of left-out runs need it, few runs pulled to the usual
    error.

    What the parameters leave open of a left-out run counts beside it, as it does in `intervals`.
    """
    n, scale = kriging.left_out.size, kriging.scale
    parameters = np.minimum(
        solution.variance / (1 - np.minimum(solution.leverage, 0.7)), UNKNOWN**2
    )
    needed = np.sqrt(np.maximum((kriging.left_out / Z80) ** 2 - parameters, 0.0) / kriging.open)
    here, usual = float(np.quantile(needed, 0.8)), _PRIOR_ERROR / Z80
    return float(np.sqrt((n * here**2 + _PRIOR_RUNS * usual**2) / (n + _PRIOR_RUNS)) / scale)


def _far(kriging: Kriging) -> float:
    """Error in log far from all runs; runs that are far from each other have shown it themselves."""
    apart = float(np.clip(kriging.open, 0, 1).mean()) ** 4
    return max(FAR, kriging.scale * (_FAR_SCALES - (_FAR_SCALES - 1) * apart))
