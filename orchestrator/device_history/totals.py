"""Stored arrays as plain lists by metric, means per device, and energy of a period. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.device_history.packing import Chunk, Floats
from orchestrator.device_history.selectors import Period, mean_of, plain
from orchestrator.device_history.series import DEVICE, MAX, MEAN, MIN, NODE

_J_PER_KWH = 3.6e6


def node_series(history: Chunk, over: Period) -> dict[str, Any]:
    """`{step_s, times, devices: [{index, series}], series}`; without unread metrics."""
    return {
        "step_s": over.step_s,
        "times": over.times,
        "devices": [
            {"index": index, "series": _by_name(DEVICE, history.devices[row])}
            for row, index in enumerate(history.indexes)
        ],
        "series": _by_name(NODE, history.other),
    }


def fleet_series(history: dict[str, Floats], over: Period) -> dict[str, Any]:
    """Means by metric, the utilization per device, and the machines' kWh if power is measured."""
    lists: dict[str, Any] = {name: mean_of(values) for name, values in history.items()}
    lists["utilization"] = plain(utilization(history))
    lists["energy_kwh"] = energy_j(history, over) / _J_PER_KWH or None
    return {"step_s": over.step_s, "times": over.times, **lists}


def utilization(history: dict[str, Floats]) -> Floats:
    """The mean utilization of the devices with readings [T]; NaN without any."""
    devices = history["devices"][MEAN]
    known = np.where(devices > 0, devices, np.nan)
    return np.asarray(history["utilization"][MEAN] / known, np.float32)


def energy_j(history: dict[str, Floats], over: Period) -> float:
    """Joules of the devices whose power is measured, of all columns with readings.

    A column of which only a part has readings counts in full.
    """
    return float(np.nansum(history["power_w"][MEAN].astype(np.float64))) * over.step_s


def _by_name(names: tuple[str, ...], values: Floats) -> dict[str, Any]:
    return {
        name: {"mean": plain(one[MEAN]), "min": plain(one[MIN]), "max": plain(one[MAX])}
        for name, one in zip(names, values, strict=True)
        if not np.isnan(one[MEAN]).all()
    }
