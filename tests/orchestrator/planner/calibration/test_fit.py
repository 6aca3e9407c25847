"""Calibration on synthetic devices: what it learns, from how few runs, and what it stores."""

from __future__ import annotations

import json

import numpy as np
import pytest

from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.measurements import read_measurements
from orchestrator.planner.model.calibration_result import DEVICE_PARAMETERS, Calibration
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.kriging import krige, similarity
from orchestrator.planner.model.parameters import PARAMETERS, columns_for, defaults
from tests.orchestrator.planner.measured import errors, measured, requests, shuffled
from tests.orchestrator.planner.predicted import predicted, request
from workers.contracts.catalog.devices import device

SLOWER = {
    "gemm_efficiency": 0.6,
    "launch_s": 1.5e-3,
    "intra_efficiency": 0.5,
    "traffic_factor": 1.5,
    "jitter": 0.02,
}


@pytest.fixture(scope="module")
def runs():
    return shuffled(measured(requests(), SLOWER))


def line(pair, measured_as=None):
    """A measurement line."""
    requested, numbers = pair
    return {
        "id": "run",
        "model": requested.model.to_dict(),
        "plan": requested.plan.to_dict(),
        "cluster": requested.cluster.to_dict(),
        "workload": {"seq_len": requested.seq_len},
        "framework": {"name": requested.framework.name, "notes": "ignored"},
        "measured": measured_as if measured_as is not None else numbers,
        "_private": 1,
        "source": "a test",
    }


def test_twenty_runs_calibrate_a_device(runs):
    before = np.abs(errors(runs[20:], None)).mean()
    after = np.abs(errors(runs[20:], fit(runs[:20]))).mean()
    assert before > 0.2 and after < 0.02


def test_values_stay_within_their_bounds(runs):
    [group] = fit(runs[:20]).groups
    for name, value in group.values.items():
        known = PARAMETERS[name]
        assert known.low * (1 - 1e-9) <= value <= known.high * (1 + 1e-9), name


def test_outliers_have_little_effect(runs):
    """Three of thirty runs are three times too slow."""
    spoiled = [
        (requested, {"step_time_s": numbers["step_time_s"] * (3 if row < 3 else 1)})
        for row, (requested, numbers) in enumerate(runs[:30])
    ]
    assert np.abs(errors(runs[30:], fit(spoiled))).mean() < 0.04


def test_a_deviating_shape_is_corrected_only_near_itself():
    """tp 4 a third slower than any formula says: plans like the measured ones follow, others do
    not.
    """
    runs = [
        (
            requested,
            {"step_time_s": numbers["step_time_s"] * (1.3 if requested.plan.tp == 4 else 1)},
        )
        for requested, numbers in measured(requests(), SLOWER)
    ]
    shown, held = runs[::2], runs[1::2]
    result = np.abs(errors(held, fit(shown)))
    there = np.array([requested.plan.tp == 4 for requested, _ in held])
    assert there.sum() == 6
    assert result[there].mean() < 0.08 and result[~there].mean() < 0.05


def test_no_correction_far_from_all_runs(runs):
    requested = [
        request(
            "llama3-405b",
            {"tp": 8, "pp": 8, "dp": 8, "precision": "bf16"},
            device="a100-80g",
            using="megatron",
        )
    ]
    columns = columns_for(requested, fit(runs[:20]))
    assert float(columns["correction_runs"]) > 10
    assert table_of(requested, columns)["correction"] == pytest.approx(1.0, abs=0.02)


def test_any_measured_number_is_sufficient(runs):
    """Tokens per second, model FLOP/s or, as Megatron logs it, FLOP/s with recomputation: the same
    calibration.
    """
    pairs = runs[:12]
    requested = [each for each, _ in pairs]
    table = table_of(requested, columns_for(requested))
    seconds = np.array([numbers["step_time_s"] for _, numbers in pairs])
    devices = table.column("devices")
    tokens = table.column("step_tokens") / seconds / devices
    hardware, model = (
        table.column(f"{name}_flops") / seconds / devices / 1e12 for name in ("hardware", "model")
    )
    expected = fit(pairs).groups[0].values
    for numbers in (
        [{"tokens_per_s_per_device": value, "mfu": 0.4} for value in tokens.tolist()],
        [{"tflops_per_device": value} for value in hardware.tolist()],
        [{"tflops_per_device": value, "flops": "model"} for value in model.tolist()],
    ):
        result = (
            fit([line(pair, reported) for pair, reported in zip(pairs, numbers, strict=True)])
            .groups[0]
            .values
        )
        assert result == pytest.approx(expected, rel=1e-3)


def test_unusable_lines_are_reported(runs):
    good = line(runs[0])
    lines = [
        good,
        line(runs[1], {}),
        line(runs[2], {"step_time_s": -1}),
        line(runs[3], {"step_time_s": "fast"}),
        {**good, "plan": {"dp": 3}},
        {**good, "model": "no-such-model"},
        "not an object",
        line(runs[4], {"step_time_s": float("nan")}),
        line(runs[5], {"out_of_memory": True}),
    ]
    result = read_measurements(lines)
    assert [each["line"] for each in result.left_out] == [2, 3, 4, 5, 6, 7, 8]
    assert all(each["message"] for each in result.left_out)
    calibration = fit(lines)
    assert calibration.left_out == result.left_out
    assert calibration.groups[0].rows == 2 and calibration.groups[0].timed == 1


def test_json_round_trip(runs):
    calibration = fit(runs[:10])
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again == calibration
    requested = [each for each, _ in runs[10:14]]
    reported, back = (
        table_of(requested, columns_for(requested, each))["step_time_s"]
        for each in (calibration, again)
    )
    assert np.array_equal(reported, back)


@pytest.mark.parametrize(
    "document",
    [{}, [], None, {"version": 99, "groups": []}, {"version": 1, "groups": [{"rows": 1}]}],
)
def test_an_invalid_document_is_refused_with_a_hint(document):
    with pytest.raises(ValueError, match="fit it again"):
        Calibration.from_dict(document)


def test_device_parameters_apply_to_other_frameworks(runs):
    calibration = fit(runs[:20])
    fitted, entry = calibration.groups[0].values, device("a100-80g")
    there = columns_for([request("llama3-8b", device="a100-80g", using="fsdp2")], calibration)
    for name in PARAMETERS:
        expected = fitted[name] if name in DEVICE_PARAMETERS else defaults("fsdp2", entry)[name]
        assert there[name] == pytest.approx(expected), name
    elsewhere = columns_for(
        [request("llama3-8b", device="h100-80g", using="megatron")], calibration
    )
    assert (
        float(elsewhere["gemm_efficiency"])
        == defaults("megatron", device("h100-80g"))["gemm_efficiency"]
    )


def test_groups_do_not_mix(runs):
    """Two devices in one table: each plan uses the values and corrections of its own group."""
    other = shuffled(measured(requests(device="h100-80g"), {"gemm_efficiency": 0.3}), seed=1)
    both = fit([*runs[:20], *other[:20]])
    alone = [fit(runs[:20]), fit(other[:20])]
    assert [each.device for each in both.groups] == ["a100-80g", "h100-80g"]
    requested = [runs[30][0], other[30][0]]
    mixed = table_of(requested, columns_for(requested, both))["step_time_s"]
    single = [
        float(table_of([each], columns_for([each], own))["step_time_s"][0])
        for each, own in zip(requested, alone, strict=True)
    ]
    assert mixed == pytest.approx(single, rel=1e-9)


def test_measured_peaks_correct_memory_too():
    requested = requests()[:24]
    table = table_of(requested, columns_for(requested))
    runs = [
        (each, {"peak_bytes": float(total) * 1.04})
        for each, total in zip(requested, table.column("total_bytes"), strict=True)
    ]
    [group] = fit(runs).groups
    after = table_of(requested, columns_for(requested, fit(runs))).column("total_bytes")
    peaks = np.array([numbers["peak_bytes"] for _, numbers in runs])
    assert (
        np.abs(after / peaks - 1).mean()
        < 0.02
        < np.abs(table.column("total_bytes") / peaks - 1).mean()
    )
    assert (group.weighed, group.timed) == (24, 0)
    unchanged = table_of(requested, columns_for(requested, fit(runs))).column("step_time_s")
    assert unchanged == pytest.approx(table.column("step_time_s"))


def test_defaults_are_within_bounds():
    for name in ("v100-32g", "a100-80g", "h100-80g", "b200-192g", "mi300x-192g", "cpu"):
        for using in (
            "orrery",
            "fsdp2",
            "megatron",
            "megatron-deepspeed",
            "llm-foundry",
            "deepspeed",
        ):
            for parameter, value in defaults(using, device(name)).items():
                known = PARAMETERS[parameter]
                assert known.low <= value <= known.high, (name, using, parameter)


def test_an_explained_number_names_its_parameters():
    from orchestrator.planner.model.terms import explain

    tree = explain(predicted("llama3-8b", {"dp": 2, "precision": "bf16"}), "memory_rate")
    assert [(each.name, each.formula) for each in tree.inputs] == [
        ("memory_bandwidth", "given"),
        ("memory_efficiency", "given"),
    ]
    assert "calibration or default profile" in tree.inputs[1].source


def test_a_run_whose_settings_are_not_stated_corrects_its_neighbors_less():
    points = np.array([[0.0], [0.2], [3.0]])
    residuals, leverage = np.array([0.3, 0.0, 0.01]), np.zeros(3)
    stated = krige(points, residuals, leverage)
    unstated = krige(points, residuals, leverage, np.array([0.1, 0.0, 0.0]))

    def correction(kriging):
        return float((similarity(np.array([[0.1]]), kriging.points) @ kriging.weights)[0])

    assert 0 < correction(unstated) < 0.7 * correction(stated)
    same = krige(points, residuals, leverage, np.zeros(3))
    assert correction(same) == pytest.approx(correction(stated))
