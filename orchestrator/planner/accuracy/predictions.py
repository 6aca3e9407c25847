"""Predictions of measured runs and their measurements, with or without a calibration.

Does not compute errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.measurements import (
    MEMORY_KEYS,
    Pair,
    measured_numbers,
    out_of_memory,
    peaks,
    read_measurements,
    reports_reserved,
    step_times,
)
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import Table
from orchestrator.planner.model.time.intervals import bounds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predicted:
    """Seconds per step `(n,)`: predicted, its interval, measured."""

    predicted: Floats
    low: Floats
    high: Floats
    measured: Floats


def read_file(path: Path) -> list[Pair]:
    """The usable runs of one measurement file."""
    with path.open(encoding="utf-8") as lines:
        return read_measurements(json.loads(line) for line in lines if line.strip()).pairs


def timed(pairs: Sequence[Pair]) -> list[Pair]:
    """Runs with a measured time, without their memory measurements."""
    return [
        (
            request,
            {
                key: value
                for key, value in measured.items()
                if key not in (*MEMORY_KEYS, "out_of_memory")
            },
        )
        for request, measured in pairs
        if measured_numbers(measured).keys() - set(MEMORY_KEYS)
    ]


def predict(pairs: Sequence[Pair], calibration: Calibration | None = None) -> Predicted:
    """Predicted times, intervals and measured times."""
    requests = [request for request, _ in pairs]
    table = table_of(requests, columns_for(requests, calibration))
    low, high = bounds(table, requests, calibration)
    return Predicted(table.column("step_time_s"), low, high, step_times(pairs, table))


def predict_times(
    pairs: Sequence[Pair], calibration: Calibration | None = None
) -> tuple[Floats, Floats]:
    """Predicted and measured seconds per step `(n,)`, without intervals."""
    requests = [request for request, _ in pairs]
    table = table_of(requests, columns_for(requests, calibration))
    return table.column("step_time_s"), step_times(pairs, table)


def predict_held_out(calibrating: Sequence[Pair], held_out: Sequence[Pair]) -> Predicted:
    """Predictions of held-out runs with a calibration from the others."""
    return predict(held_out, fit(calibrating))


def memory(
    pairs: Sequence[Pair], calibration: Calibration | None = None
) -> tuple[Table, Floats, NDArray[np.bool_]]:
    """The table with every stage, measured peak bytes (nan if none), and out-of-memory runs.

    Its `reported_peak_bytes` are those that the runs report, allocated or reserved.
    """
    requests = [request for request, _ in pairs]
    table = table_of(requests, columns_for(requests, calibration))
    return (
        table.with_columns({"reports_reserved": np.asarray(reports_reserved(pairs), float)}),
        peaks(pairs),
        out_of_memory(pairs),
    )
