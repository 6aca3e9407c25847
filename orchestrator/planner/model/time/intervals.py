"""80% intervals of the step time: how far the measured run may lie from the prediction.

Three parts add up in log space: what the fitted parameters leave open, what runs near the plan
leave open of the
residuals (kriging), and how far the plan lies beyond all of them. Predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.kriging import LENGTHS, coordinates, unexplained
from orchestrator.planner.model.parameters import fixed_columns
from orchestrator.planner.model.profiles import Published, published
from orchestrator.planner.model.terms import Column, Table

if TYPE_CHECKING:
    from orchestrator.planner.model.calibration_result import Calibration, Group

Floats = NDArray[np.float64]

Z80 = 1.2816
# without a calibration of the pair, in log: where no published runs stand behind its profile, and
# where the device was
# calibrated with another framework
UNKNOWN, RELATED = 0.20, 0.12
FAR = 0.03  # error of the formulas in log at shapes that no run is near to, at least
_STEP = 0.25


def bounds(
    table: Table, requests: Sequence[Request], calibration: Calibration | None = None
) -> tuple[Column, Column]:
    """Low and high of `step_time_s`, each `(n,)`: log-normal around the prediction."""
    spread = np.zeros(len(requests))
    rows: dict[tuple[str, str], list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault((request.entry.name, request.framework.name), []).append(row)
    for (device, framework), here in rows.items():
        own = table if len(here) == len(requests) else table.take(here)
        before = _uncalibrated(own, published(framework, requests[here[0]].entry))
        group = calibration.group(device, framework) if calibration else None
        if group is not None and group.timed:
            spread[here] = _calibrated(own, group, before)
        elif calibration and calibration.values_for(device, framework):
            spread[here] = RELATED
        else:
            spread[here] = np.sqrt(before)
    factor = np.exp(Z80 * spread)
    time = table.column("step_time_s")
    return np.asarray(time / factor), np.asarray(time * factor)


def extrapolations(
    table: Table, requests: Sequence[Request], calibration: Calibration | None = None
) -> list[str]:
    """A sentence on what of each plan lies beyond the runs that its time rests on; empty where it
    is among them.
    """
    found = []
    for row, request in enumerate(requests):
        pair = (request.entry.name, request.framework.name)
        known = published(pair[1], request.entry)
        if calibration and calibration.values_for(*pair):
            message = calibration.extrapolates(*pair, table, row)
        else:
            message = known.coverage.describe_outside(table, row) if known else []
        found.append(
            f"Its time is extrapolated, so that it is less certain: {'; '.join(message)}."
            if message
            else ""
        )
    return found


def _uncalibrated(table: Table, known: Published | None) -> Floats:
    """Variance of log step time where the default profile is all there is; no more than where
    nothing is known.
    """
    if known is None:
        return np.full(table.n, UNKNOWN**2)
    return np.asarray(np.minimum(known.spread**2 + known.coverage.variance(table), UNKNOWN**2))


def _calibrated(table: Table, group: Group, before: Floats) -> Floats:
    columns = {name: table.column(name) for name in LENGTHS}
    open_share = unexplained(
        coordinates(columns, table.n), np.array(group.points), np.array(group.noise)
    )
    # the widening was found among runs that have others near them; far from all of them formulas
    # have their usual error
    near = group.scale * group.widening
    far = np.clip(open_share, 0, 1) ** 4
    spread = (near + max(group.far - near, 0.0) * far) ** 2 * open_share
    # few runs leave directions open that the priors alone bound: no less is known than without any
    # run
    most = np.maximum(before - FAR**2, 0.0)
    left = np.minimum(_of_parameters(table, group) + group.coverage.variance(table), most)
    return np.asarray(np.sqrt(spread + left))


def _of_parameters(table: Table, group: Group) -> Floats:
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
