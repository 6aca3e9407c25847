"""Each source predicted from the others: what leaves the fit, and the command that reports it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from orchestrator.planner.accuracy.left_out_sources import (
    best_mfu,
    error_spread,
    leave_sources_out,
)
from orchestrator.planner.calibration.hierarchy import fit_effects
from tests.orchestrator.planner.calibration.test_fit import line
from tests.orchestrator.planner.measured import measured, requests

SLOW = {"gemm_efficiency": 0.5}


def sources():
    """Three sources of two frameworks and devices, each as slow as the others."""
    pairs = {
        "mosaic": requests(device="h100-80g", using="llm-foundry")[::6],
        "b200": requests(device="a100-80g")[::6],
        "korthikanti": requests(device="a100-80g", using="megatron-deepspeed")[::6],
    }
    return {name: measured(each, SLOW) for name, each in pairs.items()}


def test_a_source_is_predicted_without_its_own_runs():
    known = sources()
    rows = {row.source: row for row in leave_sources_out(known)}
    assert set(rows) == set(known)
    assert all(row.source not in row.fitted for row in rows.values())
    odd = {**known, "b200": [(r, {"step_time_s": 3 * m["step_time_s"]}) for r, m in known["b200"]]}
    changed = {row.source: row for row in leave_sources_out(odd)}
    # the prediction does not see the source's own times
    before, after = rows["b200"].bias, changed["b200"].bias
    assert 1 + after / 100 == pytest.approx((1 + before / 100) / 3, rel=1e-6)


def test_effects_share_what_devices_and_frameworks_have_in_common():
    known = sources()
    effects = fit_effects(known)
    request = requests(device="h100-80g", using="deepspeed")[0]
    values = effects.values("deepspeed", request.entry)
    assert values["gemm_efficiency"] < 0.6  # no run measured the pair; all others are slow
    assert set(effects.biases) == set(known)
    assert set(best_mfu(known)) == {"h100-80g half", "a100-80g half"}


def test_sources_weigh_the_same_in_the_spread():
    large, small = np.full(1000, 0.02), np.array([0.3, 0.3])
    assert error_spread([large, small]) == pytest.approx(0.3 / 1.2816)


def test_command_writes_the_table(tmp_path, capsys):
    with pytest.raises(CommandError, match="at least 3 are needed"):
        call_command("planner_accuracy", "--measurements", tmp_path, "--leave-one-source-out")
    for name, pairs in sources().items():
        text = "\n".join(json.dumps(line(pair)) for pair in pairs)
        (tmp_path / f"{name}.jsonl").write_text(text)
    out = tmp_path / "accuracy.md"
    options = ["--measurements", tmp_path, "--leave-one-source-out", "--out", out]
    call_command("planner_accuracy", *options)
    table = out.read_text()
    assert "<!-- sources: begin -->" in table and "| mosaic | 12 | " in table
    assert "Each source predicted from the others" in capsys.readouterr().out
