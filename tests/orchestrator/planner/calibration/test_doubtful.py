"""Runs that are impossible or contradict others: named, and counted less or not at all."""

from __future__ import annotations

import numpy as np

from orchestrator.planner.calibration.doubtful import find_doubts
from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.measurements import reports_reserved
from orchestrator.planner.model.calibration_result import Calibration
from tests.orchestrator.planner.measured import errors, measured, requests, shuffled


def test_an_impossible_run_is_left_out_and_named():
    good = shuffled(measured(requests(), {"gemm_efficiency": 0.6}))[:20]
    request, numbers = good[0]
    bad = [(request, {"step_time_s": numbers["step_time_s"] / 50}), *good[1:]]
    calibration = fit(bad)
    [doubt] = calibration.doubtful
    assert (
        doubt["line"] == 1 and "impossible" in doubt["message"] and "a100-80g" in doubt["message"]
    )
    assert sum(group.rows for group in calibration.groups) == 19
    assert Calibration.from_dict(calibration.to_dict()).doubtful == calibration.doubtful


def test_contradictory_runs_count_less_and_are_named():
    pairs = shuffled(measured(requests(), {"gemm_efficiency": 0.6}))
    request, numbers = pairs[0]
    twice = [*pairs[:19], (request, {"step_time_s": 2 * numbers["step_time_s"]})]
    doubts = find_doubts(twice)
    assert set(doubts.messages) == {0, 19} and "contradictory: 2 runs" in doubts.messages[0]
    assert 0 < doubts.scales[0] < 0.5 and np.all(doubts.scales[1:19] == 1)
    # the other predictions do not suffer
    assert np.abs(errors(pairs[20:], fit(twice))).mean() < 0.03


def test_a_run_names_its_kind_of_peak():
    request = requests(device="h100-80g", using="fsdp2")[0]
    lines = [
        {"peak_bytes": 1e10},
        {"peak_bytes": 1e10, "peak_kind": "allocated"},
        {"peak_reserved_bytes": 1e10},
    ]
    assert reports_reserved([(request, each) for each in lines]).tolist() == [True, False, True]
    other = requests()[0]
    assert reports_reserved([(other, lines[0]), (other, lines[2])]).tolist() == [False, True]
