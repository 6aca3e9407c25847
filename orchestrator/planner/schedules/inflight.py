"""Micro-batches whose activations each device of a pipeline holds at its peak.

Does not depend on bytes per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchestrator.planner.schedules.orders import SCHEDULES

Floats = NDArray[np.float64]


def in_flight(
    schedule: ArrayLike,
    pp: ArrayLike,
    virtual_stages: ArrayLike,
    micro_batches: ArrayLike,
    device: ArrayLike,
) -> Floats:
    """Largest number of micro-batches held on `device` (0-based), in full devices.

    A chunk counts 1 / virtual_stages. `schedule` holds indices into `SCHEDULES`; all arguments
    broadcast. A micro-batch is held from its forward to the end of its weight gradient. These are
    the peaks of the orders that torch runs. With m a multiple of p: interleaved 1F1B holds p(1 + (p
    - 1)/(pv)) on device 0 (arXiv 2205.05198, section 5) and less on later ones; zb1p and zbv p on
    every device (2401.10241); dualpipev p + 1/2, with every parameter placed once (the p + 1 with
    two copies is DualPipe's, 2412.19437). pipedream holds p - device for any size of a step,
    because it never flushes.
    """
    code, p, v, m, at = (
        np.asarray(a, np.float64) for a in (schedule, pp, virtual_stages, micro_batches, device)
    )
    out = np.zeros(np.broadcast_shapes(code.shape, p.shape, v.shape, m.shape, at.shape))
    # few schedules per column: a formula over all rows is faster than selecting its rows
    for index, name in enumerate(SCHEDULES):
        rows = code == index
        if rows.any():
            np.copyto(out, _PEAKS[name](p, v, m, at), where=rows)
    return out


def weight_versions(pp: ArrayLike, device: ArrayLike) -> NDArray[np.int64]:
    """Weight versions that pipedream stores: p - device, one per micro-batch in flight."""
    return np.asarray(pp, np.int64) - np.asarray(device, np.int64)


def _interleaved(p: Any, v: Any, m: Any, at: Any) -> Any:
    per_round = m // np.maximum(1, m // p)
    return np.minimum(v * m, (v - 1) * per_round + 2 * (p - 1 - at) + 1) / v


def _zb1p(p: Any, v: Any, m: Any, at: Any) -> Any:
    per_round = m // np.maximum(1, m // p)
    return np.minimum(v * m, (v - 1) * per_round + p) / v


_PEAKS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "naive": lambda p, v, m, at: np.minimum(m, 1),
    "gpipe": lambda p, v, m, at: m,
    "1f1b": lambda p, v, m, at: np.minimum(m, p - at),
    "interleaved_1f1b": _interleaved,
    "zb1p": _zb1p,
    "zbv": lambda p, v, m, at: np.minimum(np.minimum(m, p), (m + 1 + at) / 2),
    "dualpipev": lambda p, v, m, at: p + 0.5,
    "pipedream": lambda p, v, m, at: p - at,
}
