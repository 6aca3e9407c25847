"""The compile gate: shipped configurations pass, and each breach has a message.

By default the last configuration of each kernel for sm_90, mostly the largest; all of them for both
architectures with ORRERY_TEST_MATRIX=full.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import compile_check, tuning
from kernels.gpu.cases import Bench, cases
from kernels.gpu.goals import GOALS
from kernels.shipped import ShippedKernel
from tests.matrix import select

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_the_last_configuration_of_each_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tuning.cache_home() / "triton"))
    last = {
        (shipped.op, shipped.fn.__name__): shipped
        for module in compile_check.shipping_modules()
        for shipped in importlib.import_module(module).shipped("sm_90")
    }
    results = [compile_check.compile_kernel(shipped, "sm_90") for shipped in last.values()]
    assert len(results) > 30
    assert [message for result in results for message in result.breaches] == []
    assert all(result.registers > 0 for result in results)


def test_the_command_reports_the_configurations_of_an_operation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tuning.cache_home() / "triton"))
    assert compile_check.main(["--only", "moe_gate", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] and {kernel["op"] for kernel in record["kernels"]} == {"moe_gate"}


@pytest.mark.parametrize("arch", select(["sm_90", "sm_80"], []))
@pytest.mark.timeout(900)
def test_everything_shipped_passes(arch: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gate", "--arch", arch, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(done.stdout)
    assert record["ok"] and len(record["kernels"]) > 10
    assert all(kernel["registers"] > 0 for kernel in record["kernels"])


def test_each_breach_has_a_message() -> None:
    one = ShippedKernel("op", "name", None, {}, {}, expects=("wgmma",))
    message = compile_check._breaches(one, "sm_90", 16, 300_000, "mma.sync")
    assert len(message) == 3
    assert (
        "spills 16 bytes" in message[0]
        and "300,000" in message[1]
        and "232,448" in message[1]
        and "no wgmma" in message[2]
    )
    excused = ShippedKernel("op", "name", None, {}, {}, spills_ok="measured faster so")
    assert compile_check._breaches(excused, "sm_90", 16, 0, "") == []
    assert "remove spills_ok" in compile_check._breaches(excused, "sm_90", 0, 0, "")[0]


def test_a_wrong_architecture_or_operation_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--arch", "h100"], "sm_90"),
        (["--only", "nothing"], "no operation"),
    ):
        with pytest.raises(SystemExit):
            compile_check.main(arguments)
        assert message in capsys.readouterr().err


def test_benchmarks_refer_to_existing_goals() -> None:
    checks, benches = cases()
    assert checks and all(isinstance(bench, Bench) for bench in benches)
    assert {bench.goal for bench in benches if bench.goal} <= set(GOALS)
    names = [(case.op, case.case) for case in (*checks, *benches)]
    assert len(set(names)) == len(names)
