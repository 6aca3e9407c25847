"""80% intervals of the step time.

Three parts add up in log space: uncertainty of the fitted parameters, residuals that runs near the
plan do not explain (kriging), and the distance from all runs. Does not predict times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.calibration_result import Calibration, Group
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.kriging import LENGTHS, coordinates, unexplained
from orchestrator.planner.model.parameters import fixed_columns
from orchestrator.planner.model.priors import unmeasured_error
from orchestrator.planner.model.profiles import Published, published
from orchestrator.planner.model.terms import Column, Table
from workers.contracts.catalog.devices import Device

Floats = NDArray[np.float64]

Z80 = 1.2816
# log error without a calibration of the pair: at most, or if the device was calibrated with another
# framework
UNKNOWN, RELATED = 0.20, 0.12
# log error after a run of 20 steps of one plan: that run's plan and shapes near it
PROBED = 0.08
FAR = 0.03  # minimum log error of the formulas at shapes far from all runs
_STEP = 0.25


def bounds(
    table: Table, requests: Sequence[Request], calibration: Calibration | None = None
) -> tuple[Column, Column]:
    """Low and high of `step_time_s`, each `(n,)`: log-normal around the prediction."""
    spread = np.zeros(len(requests))
    rows: dict[tuple[str, str], list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault((request.entry.name, request.framework.name), []).append(row)
    for (device, framework), group_rows in rows.items():
        own = table if len(group_rows) == len(requests) else table.take(group_rows)
        first = requests[group_rows[0]].entry
        before = _uncalibrated(own, published(framework, first), unmeasured_error(framework, first))
        group = calibration.group(device, framework) if calibration else None
        if group is not None and group.timed:
            spread[group_rows] = _calibrated(own, group, before)
        elif calibration and calibration.values_for(device, framework):
            spread[group_rows] = RELATED
        else:
            spread[group_rows] = np.sqrt(before)
    spread = np.hypot(spread, [request.open_spread for request in requests])
    factor = np.exp(Z80 * spread)
    time = table.column("step_time_s")
    return np.asarray(time / factor), np.asarray(time * factor)


def extrapolations(
    table: Table, requests: Sequence[Request], calibration: Calibration | None = None
) -> list[str]:
    """One message per plan on what lies beyond the measured runs; empty if nothing does."""
    messages = []
    for row, request in enumerate(requests):
        pair = (request.entry.name, request.framework.name)
        known = published(pair[1], request.entry)
        if calibration and calibration.values_for(*pair):
            outside = calibration.extrapolates(*pair, table, row)
        elif known is None:
            messages.append(unmeasured(request.entry, pair[1]))
            continue
        else:
            outside = known.coverage.describe_outside(table, row)
        messages.append(
            f"Its time is extrapolated, so that it is less certain: {'; '.join(outside)}."
            if outside
            else ""
        )
    return messages


def unmeasured(device: Device, framework: str) -> str:
    """What to say about a pair without any measurement, and what a short run would change."""
    if device.name == "cpu":
        return ""
    error = unmeasured_error(framework, device)
    width, narrowed = (np.exp(Z80 * spread) - 1 for spread in (error, PROBED))
    return (
        f"No measurement of {framework} on {device.name} yet: the prediction rests on other "
        f"engines and devices and is within about {width:.0%}. A run of 20 steps on these "
        f"devices would narrow that to about {narrowed:.0%}."
    )


def _uncalibrated(table: Table, known: Published | None, unmeasured: float) -> Floats:
    """Variance of log step time with the default profile only; `unmeasured` without published runs
    of the pair.
    """
    if known is None:
        return np.full(table.n, unmeasured**2)
    return np.asarray(np.minimum(known.spread**2 + known.coverage.variance(table), UNKNOWN**2))


def _calibrated(table: Table, group: Group, before: Floats) -> Floats:
    columns = {name: table.column(name) for name in LENGTHS}
    open_share = unexplained(
        coordinates(columns, table.n), np.array(group.points), np.array(group.noise)
    )
    # the widening is fitted to runs with others near them; far from all runs the formulas have
    # their usual error
    near = group.scale * group.widening
    far = np.clip(open_share, 0, 1) ** 4
    spread = (near + max(group.far - near, 0.0) * far) ** 2 * open_share
    # with few runs only the priors bound some directions; the variance is at most that without runs
    limit = np.maximum(before - FAR**2, 0.0)
    remaining = np.minimum(
        _parameter_variance(table, group) + group.coverage.variance(table), limit
    )
    return np.asarray(np.sqrt(spread + remaining))


def _parameter_variance(table: Table, group: Group) -> Floats:
    """Variance of log step time from the parameters' covariance."""
    fixed = fixed_columns(table, "step_time_s", set(group.names))
    before = np.log(table.column("step_time_s"))
    parameters = {each: table[each] for each in group.names}
    slopes = []
    for name, variance in zip(group.names, np.diag(np.array(group.covariance)), strict=True):
        step = _STEP * np.sqrt(max(float(variance), 1e-12))
        moved = Table({**fixed, **parameters, name: table[name] * np.exp(step)}, table.n)
        slopes.append((np.log(moved.column("step_time_s")) - before) / step)
    return np.asarray(
        np.einsum("kn,kl,ln->n", slopes, np.array(group.covariance), slopes), np.float64
    )
