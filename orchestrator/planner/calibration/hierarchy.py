"""Priors of the time parameters for any framework and device, from all published runs together.

The logarithm of a parameter is a sum: common + what datasheets and kernel papers state + trend x
power density of the device + effects of the device's generation, the framework, and the pair.
Effects shrink to 0 without evidence, so a pair without runs gets what its device and its framework
have in common with others.
Does not predict single plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import orchestrator.planner.model.all_terms  # noqa: F401  registers the terms
from orchestrator.planner.calibration.least_squares import FREEDOM, Floats
from orchestrator.planner.calibration.measurements import Pair, step_times
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.kriging import NO_CORRECTION
from orchestrator.planner.model.parameters import PARAMETERS, fixed_columns
from orchestrator.planner.model.priors import (
    POWER_TREND,
    Effects,
    densities_of,
    offsets,
    power_density,
    unit_names,
)
from orchestrator.planner.model.terms import TERMS, Table, leaves

_TERM = "step_time_s"
# a source counts as at most this many runs, so that a large one does not decide alone
_MOST_RUNS = 16
_SPREAD = 0.10  # log error at which a run starts to count as odd
_ROUNDS = 25
_BIAS = 0.08  # prior spread of a source's bias
_TREND_SPREAD = 0.15
# prior spread of each kind of effect, relative to the parameter's own
_SHARES = {"common": 0.5, "trend": 1.0, "generation": 0.5, "framework": 0.35, "pair": 0.35}
# parameters of products, which a device limits by its power
_TRENDS = frozenset({"gemm_efficiency", "head_efficiency"})


@dataclass(frozen=True)
class _Design:
    """Which unit of effects each run has: `(n, units)`, and the units' names and prior shares.

    `known` are each run's offsets by parameter, `spreads` the log error `(n,)` at which it starts
    to count as odd: more if it leaves settings open.
    """

    units: list[str]
    rows: Floats
    shares: Floats
    origins: list[str]
    from_origin: Floats
    known: list[dict[str, float]]
    spreads: Floats
    densities: tuple[float, float]


def fit_effects(sources: Mapping[str, Sequence[Pair]]) -> Effects:
    """Fits all effects to the step times of all sources by robust least squares with priors.

    Raises ValueError without any timed run.
    """
    chosen = [pair for pairs in sources.values() for pair in _thinned(pairs)]
    origins = [name for name, pairs in sources.items() for _ in _thinned(pairs)]
    weights = np.array(
        [
            min(1.0, _MOST_RUNS / len(own))
            for pairs in sources.values()
            if (own := _thinned(pairs))
            for _ in own
        ]
    )
    if not chosen:
        raise ValueError("no source has a run with a step time")
    requests = [request for request, _ in chosen]
    start = {name: np.asarray(each.default) for name, each in PARAMETERS.items()}
    table = table_of(requests, {**NO_CORRECTION, **start})
    measured = np.log(step_times(chosen, table))
    known = np.isfinite(measured)
    table, measured, weights = table.take(known), measured[known], weights[known]
    design = _design(
        [request for request, keep in zip(requests, known, strict=True) if keep],
        [name for name, keep in zip(origins, known, strict=True) if keep],
    )
    names = sorted(leaves(TERMS, [_TERM]) & set(PARAMETERS))
    fixed = fixed_columns(table, _TERM, set(names))
    effects, biases = _solve(table, names, fixed, measured, weights, design)
    return Effects.of(
        design.units,
        names,
        effects,
        dict(zip(design.origins, biases.tolist(), strict=True)),
        design.densities,
    )


def _thinned(pairs: Sequence[Pair]) -> list[Pair]:
    """At most about 120 runs of a source, evenly over its order."""
    timed = [pair for pair in pairs if pair[1].keys() - {"peak_bytes", "out_of_memory"}]
    every = max(1, len(timed) // 120)
    return timed[::every]


def _design(requests: Sequence[Request], sources: Sequence[str]) -> _Design:
    labels = [unit_names(request.framework.name, request.entry) for request in requests]
    densities = densities_of([request.entry for request in requests])
    units = ["common", "trend", *sorted({name for row in labels for name in row[1:]})]
    place = {name: column for column, name in enumerate(units)}
    rows = np.zeros((len(labels), len(units)))
    for row, (names, request) in enumerate(zip(labels, requests, strict=True)):
        rows[row, [place[name] for name in names]] = 1.0
        rows[row, 1] = power_density(request.entry, densities)
    shares = np.array([_SHARES[name.partition(":")[0]] for name in units])
    origins = sorted(set(sources))
    from_origin = np.array([[float(name == own) for own in origins] for name in sources])
    known = [offsets(each.framework.name, each.entry) for each in requests]
    spreads = np.array([np.hypot(_SPREAD, each.open_spread) for each in requests])
    return _Design(units, rows, shares, origins, from_origin, known, spreads, densities)


def _solve(
    table: Table,
    names: list[str],
    fixed: Mapping[str, object],
    measured: Floats,
    weights: Floats,
    design: _Design,
) -> tuple[Floats, Floats]:
    """Effects `(units, parameters)` and the sources' biases, in log space.

    "common" includes the defaults. A bias is what all runs of a source take longer than the
    formulas with the same parameters as others: its clock, network, or wrong labels.
    """
    items = [PARAMETERS[name] for name in names]
    low, high = (np.log([getattr(item, side) for item in items]) for side in ("low", "high"))
    sigma = np.array([item.sigma for item in items])
    prior = design.shares[:, None] * sigma
    prior[1, [name not in _TRENDS for name in names]] = 1e-3
    center = np.zeros((len(design.units), len(names)))
    center[0] = np.log([item.default for item in items])
    center[1, [name in _TRENDS for name in names]] = POWER_TREND
    prior[1, [name in _TRENDS for name in names]] = _TREND_SPREAD
    size, shape = center.size, center.shape
    start = np.concatenate([center.reshape(-1), np.zeros(len(design.origins))])
    widths = np.concatenate([prior.reshape(-1), np.full(len(design.origins), _BIAS)])

    known = np.array([[own.get(name, 0.0) for name in names] for own in design.known])
    spreads = design.spreads

    def logs_of(x: Floats) -> Floats:
        return np.asarray(np.clip(known + design.rows @ x[:size].reshape(shape), low, high))

    def predicted(x: Floats) -> Floats:
        logs = logs_of(x)
        moved = {name: np.exp(logs[:, column]) for column, name in enumerate(names)}
        log_time = np.log(Table({**fixed, **moved}, table.n).column(_TERM))
        return np.asarray(log_time + design.from_origin @ x[size:])

    def cost(x: Floats, residuals: Floats) -> float:
        robust = weights * (FREEDOM + 1) / 2 * np.log1p((residuals / spreads) ** 2 / FREEDOM)
        return float(2 * robust.sum() + (((x - start) / widths) ** 2).sum())

    effects, damping = start.copy(), 1e-2
    residuals = predicted(effects) - measured
    for _ in range(_ROUNDS):
        slopes = _slopes(table, names, fixed, logs_of(effects))
        own = (design.rows[:, :, None] * slopes[:, None, :]).reshape(len(measured), -1)
        jacobian = np.concatenate([own, design.from_origin], axis=1)
        w = weights * (FREEDOM + 1) / (FREEDOM + (residuals / spreads) ** 2) / spreads**2
        gradient = jacobian.T @ (w * residuals) + (effects - start) / widths**2
        normal = (jacobian.T * w) @ jacobian + np.diag(1 / widths**2)
        before, moved = cost(effects, residuals), False
        for _ in range(8):
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            candidate = effects + np.clip(step, -0.7, 0.7)
            new = predicted(candidate) - measured
            if np.isfinite(new).all() and cost(candidate, new) < before:
                moved = True
                break
            damping *= 4
        if not moved:
            break
        gain = before - cost(candidate, new)
        effects, residuals, damping = candidate, new, max(damping / 5, 1e-9)
        if gain < 1e-2:
            break
    return effects[:size].reshape(shape), effects[size:]


def _slopes(
    table: Table, names: list[str], fixed: Mapping[str, object], logs: Floats, step: float = 1e-3
) -> Floats:
    """Derivatives of log step time by the log of each parameter, `(n, parameters)`."""
    values = {name: np.exp(logs[:, column]) for column, name in enumerate(names)}
    base = np.log(Table({**fixed, **values}, table.n).column(_TERM))
    return np.stack(
        [
            (
                np.log(
                    Table({**fixed, **values, name: values[name] * np.exp(step)}, table.n).column(
                        _TERM
                    )
                )
                - base
            )
            / step
            for name in names
        ],
        axis=1,
    )
