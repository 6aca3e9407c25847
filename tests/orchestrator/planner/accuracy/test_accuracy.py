"""The validation report: its measures against values known by hand, its rows from a directory of
measured runs.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from orchestrator.planner.accuracy import measures
from orchestrator.planner.accuracy.report import report
from orchestrator.planner.accuracy.splits import leave_one_out, random_splits
from tests.orchestrator.planner.calibration.test_fit import line
from tests.orchestrator.planner.measured import measured, requests


def test_measures():
    predicted, times = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.1, 2.0, 2.5, 5.0])
    assert measures.mean_error(predicted, times) == pytest.approx(
        100 * (0.1 / 1.1 + 0 + 0.2 + 0.2) / 4
    )
    assert measures.coverage(predicted * 0.95, predicted * 1.05, times) == 25.0
    assert measures.median_width(predicted * 0.9, predicted * 1.1, predicted) == pytest.approx(20.0)
    # in the first group the best is chosen, in the second one that takes half as long again; one
    # alone has no choice
    lost = measures.regret(
        np.array([1, 2, 1, 2, 9.0]), np.array([1, 3, 3, 2, 9.0]), ["a", "a", "b", "b", "c"]
    )
    assert lost.tolist() == [0.0, 50.0]
    assert measures.spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1.0)
    assert measures.spearman(np.array([1.0, 1, 2, 3]), np.array([3.0, 2, 1, 1])) == pytest.approx(
        -0.8888888, abs=1e-6
    )
    result = measures.fit_errors(
        np.array([True, True, False, False]), np.array([False, True, False, True])
    )
    assert (result.ran, result.out_of_memory, result.false_fits, result.false_refusals) == (
        2,
        2,
        1,
        1,
    )


def test_splits_never_show_what_they_hold_out():
    pairs = measured(requests(), {})
    for split in random_splits(pairs, 10, (0, 1)):
        shown, held = (
            {id(request_list) for request_list, _ in each}
            for each in (split.calibrating, split.held_out)
        )
        assert len(shown) == 10 and not shown & held and len(shown | held) == len(pairs)
    widths = list(leave_one_out(pairs, lambda pair: pair[0].model.hidden))
    assert [split.name for split in widths] == ["1024", "2048"]
    assert {request_list.model.hidden for request_list, _ in widths[0].calibrating} == {2048}


def test_report_from_a_directory(tmp_path):
    """Runs of a device that is a fifth slower than the profile: uncalibrated errors show it,
    calibrated ones do not.
    """
    one_node = [each for each in requests(using="megatron-deepspeed") if each.plan.world_size <= 8]
    two_nodes = [each for each in requests(using="megatron-deepspeed") if each.plan.world_size > 8]
    truth = {"gemm_efficiency": 0.6, "launch_s": 1.4e-3}
    lines = [line(pair) for pair in measured(one_node + two_nodes, truth, noise=0.01)]
    (tmp_path / "vtrain.jsonl").write_text("\n".join(json.dumps(each) for each in lines))
    rows, text = report(tmp_path, seeds=(0,))
    by_test = {(row.test, row.case): row for row in rows}
    assert by_test["step time, no calibration", "vtrain"].reached > 8
    held = by_test["step time, held out", "vtrain, one node, 30 calibrating"]
    assert held.passed and held.reached < 3 and held.runs == len(one_node) - 30
    assert by_test["Spearman", "vtrain, one node"].reached > 0.99
    table = text.splitlines()
    assert len(table) == len(rows) + 2 and all(each.count("|") == 8 for each in table)
    assert "vTrain 8.37" in text and "seed" in text


def test_report_without_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"vtrain\.jsonl"):
        report(tmp_path)
