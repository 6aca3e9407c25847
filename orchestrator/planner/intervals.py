"""80% intervals of the step time: how far the measured run may lie from the prediction.

Three parts add up in log space: what the fitted parameters leave open, what runs near the plan leave open of the
residuals (kriging), and how far the plan lies beyond all of them. Predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.correction import LENGTHS, coordinates, unexplained
from orchestrator.planner.inputs import Request
from orchestrator.planner.profiles import is_known
from orchestrator.planner.terms import Column, Table

if TYPE_CHECKING:
    from orchestrator.planner.calibration import Calibration, Group

Floats = NDArray[np.float64]

_Z80 = 1.2816
# without a calibration of the pair, in log: where its profile rests on published runs, where not, and where the device
# was calibrated with another framework
KNOWN, UNKNOWN, RELATED = 0.08, 0.20, 0.12
# error of the formulas in log at shapes that no run is near to: at least FAR, and more than residuals show among runs;
# left-out widths and models of published runs gave both
FAR, FAR_SCALES = 0.03, 1.7
_A_DOUBLING = 0.005  # what each doubling beyond the measured runs adds
_DIRECTIONS = 4
_STEP = 0.25


def bounds(
    table: Table, requests: Sequence[Request], calibration: Calibration | None = None
) -> tuple[Column, Column]:  # fmt: skip
    """Low and high of `step_time_s`, each `(n,)`: log-normal around the prediction."""
    spread = np.zeros(len(requests))
    rows: dict[tuple[str, str], list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault((request.entry.name, request.framework.name), []).append(row)
    for (device, framework), here in rows.items():
        group = calibration.group(device, framework) if calibration else None
        if group is not None and group.timed:
            spread[here] = _calibrated(table if len(here) == len(requests) else table.take(here), group)
        elif calibration and calibration.values_for(device, framework):
            spread[here] = RELATED
        else:
            spread[here] = KNOWN if is_known(framework, requests[here[0]].entry) else UNKNOWN
    factor = np.exp(_Z80 * spread)
    time = table.column("step_time_s")
    return np.asarray(time / factor), np.asarray(time * factor)


def _calibrated(table: Table, group: Group) -> Floats:
    columns = {name: table.column(name) for name in LENGTHS}
    open_share = unexplained(coordinates(columns, table.n), np.array(group.points), np.array(group.noise))
    # the widening was found among runs that have others near them; far from all of them formulas have their usual error
    near = group.scale * group.widening
    far = np.clip(open_share, 0, 1) ** 4
    spread = (near + max(FAR_SCALES * group.scale - near, FAR - near, 0.0) * far) ** 2 * open_share
    beyond = np.sum(list(group.outside(table).values()), axis=0) * _A_DOUBLING
    return np.asarray(np.sqrt(spread + np.minimum(_of_parameters(table, group), UNKNOWN**2)) + beyond)


def _of_parameters(table: Table, group: Group) -> Floats:
    """Variance of log step time from the parameters' covariance, along its widest directions."""
    # few runs leave directions open that the priors alone bound: no less is known than without any run
    values, vectors = np.linalg.eigh(np.array(group.covariance))
    before = np.log(table.column("step_time_s"))
    total = np.zeros(table.n)
    for place in np.argsort(values)[::-1][:_DIRECTIONS]:
        move = _STEP * np.sqrt(max(values[place], 0.0)) * vectors[:, place]
        moved: dict[str, Any] = {
            name: table[name] * np.exp(by) for name, by in zip(group.names, move, strict=True) if name in table
        }
        total += ((np.log(table.with_columns(moved).column("step_time_s")) - before) / _STEP) ** 2
    return total
