"""Fits the parameters to measured runs: step times and peaks, group by group of device and framework.

Knows which parameters a term rests on; the formulas are in the terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import orchestrator.planner.cost
import orchestrator.planner.flops
import orchestrator.planner.memory
import orchestrator.planner.steptime  # noqa: F401  their terms are used by name
from orchestrator.planner.calibration import RANGES, Calibration, Group
from orchestrator.planner.correction import LENGTHS, NONE, coordinates, krige
from orchestrator.planner.inputs import table_of
from orchestrator.planner.least_squares import Floats, Solution, solve
from orchestrator.planner.measurements import Pair, peaks, ran_out, read_lines, step_times
from orchestrator.planner.parameters import PARAMETERS, defaults
from orchestrator.planner.terms import TERMS, Table, leaves

__all__ = ["Calibration", "Group", "fit"]

# what a few runs cannot tell: as many runs with the error that calibrated predictions usually have
_PRIOR_RUNS = 5
_PRIOR_ERROR = 0.03


def fit(measurements: Iterable[Any]) -> Calibration:
    """From measurement lines, or `(request, measured)` pairs. Lines that cannot be used are told in `left_out`."""
    found = read_lines(measurements)
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in found.pairs:
        groups.setdefault((pair[0].entry.name, pair[0].framework.name), []).append(pair)
    return Calibration([_fit_group(*key, pairs) for key, pairs in sorted(groups.items())], found.left_out)


def _fit_group(device: str, framework: str, pairs: Sequence[Pair]) -> Group:
    start = defaults(framework, pairs[0][0].entry)
    requests = [request for request, _ in pairs]
    given = {**NONE, **{name: np.asarray(value) for name, value in start.items()}}
    found: dict[str, Any] = {"device": device, "framework": framework, "rows": len(pairs), "values": dict(start)}

    table = table_of(requests, given)
    time = step_times(pairs, table)
    timed = np.flatnonzero(np.isfinite(time))
    if timed.size:
        table = table.take(timed)
        names, solution = _fit_term(table, "step_time_s", time[timed], start)
        found["values"] |= dict(zip(names, np.exp(solution.x).tolist(), strict=True))
        columns = {name: table.column(name) for name in {*LENGTHS, *RANGES}}
        kriging = krige(coordinates(columns, timed.size), -solution.residuals, solution.leverage)
        found |= {
            "names": names, "covariance": solution.covariance.tolist(), "points": kriging.points.tolist(),
            "weights": kriging.weights.tolist(), "noise": kriging.noise.tolist(), "scale": kriging.scale,
            "widening": _widening(kriging.surprise, kriging.scale), "timed": int(timed.size),
            "ranges": {name: [float(columns[name].min()), float(columns[name].max())] for name in RANGES},
        }  # fmt: skip
    held, failed = peaks(pairs), ran_out(pairs)
    weighed = np.flatnonzero(np.isfinite(held) | failed)
    if np.isfinite(held).any():
        table = table_of([requests[row] for row in weighed], given)
        capacity = table.column("usable_bytes") if failed[weighed].any() else None
        names, solution = _fit_term(
            table, "total_bytes", np.where(failed[weighed], np.nan, held[weighed]), start, capacity
        )
        found["values"] |= dict(zip(names, np.exp(solution.x).tolist(), strict=True))
        found |= {"weighed": int(np.isfinite(held).sum()), "memory_spread": solution.spread}
    return Group(**found)


def _fit_term(
    table: Table, term: str, measured: Floats, start: Mapping[str, float], least: Floats | None = None
) -> tuple[list[str], Solution]:
    """Fits every parameter the term rests on, in log space. Where nothing was measured it was more than `least`."""
    names = sorted(leaves(TERMS, [term]) & set(PARAMETERS))
    chosen = [PARAMETERS[name] for name in names]
    fixed = _fixed(table, term, set(names))

    def residuals(x: Floats) -> Floats:
        moved = Table({**fixed, **dict(zip(names, np.exp(x), strict=True))}, table.n)
        value = moved.column(term)
        exact = np.log(value / measured)
        if least is None:
            return np.asarray(exact, float)
        return np.asarray(np.where(np.isnan(measured), np.minimum(np.log(value / least), 0), exact), float)

    first = np.log(np.array([start[name] for name in names]))
    low, high = np.log(np.array([each.low for each in chosen])), np.log(np.array([each.high for each in chosen]))
    return names, solve(residuals, first, low, high, np.array([each.sigma for each in chosen]))


def _fixed(table: Table, term: str, names: set[str]) -> dict[str, Any]:
    """The table's columns and every term under `term` that no parameter moves, computed once."""
    known: dict[str, bool] = {}

    def moves(name: str) -> bool:
        if name not in known:
            inputs = () if table.is_given(name) else TERMS.terms[name].inputs
            known[name] = name in names or any([moves(each) for each in inputs])
        return known[name]

    moves(term)
    return {name: table[name] for name, moving in known.items() if not moving}


def _widening(surprise: Floats, scale: float) -> float:
    """How much wider than kriging says 80% of left-out runs need it, few runs pulled to the usual error."""
    n = surprise.size
    here = float(np.quantile(surprise, 0.8)) / 1.2816 * scale
    usual = _PRIOR_ERROR / 1.2816
    return float(np.sqrt((n * here**2 + _PRIOR_RUNS * usual**2) / (n + _PRIOR_RUNS)) / scale)
