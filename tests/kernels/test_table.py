"""The table of goals: up to date in the README, and its contents for given rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu.goals import GOALS
from kernels.gpu.table import README, RESULTS, render_readme, table


def test_the_readme_table_is_up_to_date() -> None:
    assert render_readme(README.read_text(), RESULTS) == README.read_text(), (
        "run python -m kernels.gpu.table"
    )


def row(**values: Any) -> dict[str, Any]:
    common = {
        "kind": "bench",
        "op": "x",
        "case": "a",
        "ms": 1.0,
        "gb_per_s": 4100.0,
        "fraction": 0.95,
        "bound": "hbm",
    }
    work = {
        "bytes": 3 * 10**8,
        "flops": 10**9,
        "extra_bytes": 2**29,
        "spread": 0.01,
        "peer_spread": 0.02,
    }
    return {**common, **work, "peer": "torch", "ratio": 1.2, **values}


def test_rows_are_met_missed_or_open(tmp_path: Path) -> None:
    machine = {
        "kind": "machine",
        "device": "H200",
        "torch": "2.11",
        "triton": "3.6",
        "date": "2026-01-02T00:00:00",
    }
    old = [machine, row(goal="swiglu", ratio=0.5)]
    new = [
        machine,
        row(goal="swiglu", peer="torch", ratio=3.0),
        row(goal="swiglu", peer="liger", ratio=0.98),
        row(goal="rms-norm-forward", case="a"),
        row(goal="rms-norm-forward", case="b", gb_per_s=3900.0),
        row(goal="linear-cross-entropy", ms=40.0),
        row(goal="adamw", ratio=None, peer=None, peer_spread=None),
        row(goal="attention-dispatch", ratio=0.985),
        row(goal="attention-128-forward", ratio=0.79),
    ]
    (tmp_path / "gpu-1.json").write_text(json.dumps({"rows": old}))
    (tmp_path / "gpu-2.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in new) + '{"kind": "ben'
    )
    record = {
        line.split(" | ")[0].strip("| "): line
        for line in table(tmp_path).splitlines()
        if line.startswith("|")
    }
    # the fastest peer decides
    assert "0.98× liger" in record["swiglu"] and record["swiglu"].endswith("missed |")
    assert "a: 4.10 TB/s" in record["rms_norm forward"] and record["rms_norm forward"].endswith(
        "missed |"
    )  # the worst case
    assert record["linear cross-entropy, 8192 × 4096 × 131072"].endswith("met |")
    assert "0.3 GB, 1 GFLOP | hbm, 95% |" in record["swiglu"]
    # the peer itself, within the spread
    assert record["dense attention, head dim 128, as called"].endswith("met |")
    assert record["dense attention, head dim 128, forward, own kernel"].endswith("missed |")
    assert "0.50 GiB" in record["the same, memory in addition to inputs and gradients"]
    assert record["AdamW with unscale, found-inf, clip"].endswith("open |")
    assert f"6 of {len(GOALS)} measured, on H200" in table(tmp_path)


def test_a_readme_without_markers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place"):
        render_readme("# Kernels", tmp_path)
