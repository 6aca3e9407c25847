"""What a run on a GPU does with its cases, without a GPU: rows as they come, failures in words, its own clock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import runtime, tuning
from kernels.gpu.cases import Check, Compared, compare
from kernels.gpu.rows import Rows
from kernels.gpu.run import Clock, Dead, _check
from kernels.gpu.timing import Timed
from kernels.gpu.tune import ship, tune

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def right(device: torch.device) -> list[Compared]:
    return [Compared("y", 1e-7, 1e-6)]


def wrong(device: torch.device) -> list[Compared]:
    return [Compared("y", 0.5, 1e-6), Compared("dx", float("nan"), 1e-6)]


def broken(device: torch.device) -> list[Compared]:
    raise RuntimeError("an illegal memory access")


def test_checks_are_rows_at_once_and_failures_sentences(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    checks = [Check("op", "right", right), Check("op", "wrong", wrong), Check("op", "broken", broken)]
    checks.append(Check("op", "nothing", lambda device: []))
    failed, skipped = _check(rows, checks, CPU, Clock(1e6), 1e6)
    assert not skipped
    on_disk = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert [row["ok"] for row in on_disk] == [True, False, False, False]
    assert len(failed) == 4 and "op/wrong: y: error 0.5" in failed[0] and "an illegal memory access" in failed[2]
    whole = json.loads(rows.close().read_text())
    assert whole["rows"] == on_disk and not rows.path.exists()


def test_a_check_that_is_not_reached_in_time_is_skipped(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    failed, skipped = _check(rows, [Check("op", "late", right)], CPU, Clock(0.0), 0.0)
    rows.close()
    assert not failed and skipped == ["op/late: correctness not reached in its share of the time"]


def test_errors_are_compared_with_plain_torchs() -> None:
    exact, plain = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])
    assert compare("y", torch.tensor([1.19, 2.0]), exact, plain).ok
    assert not compare("y", torch.tensor([1.21, 2.0]), exact, plain).ok
    for bad in (float("nan"), float("inf")):
        assert not compare("y", torch.tensor([bad, 2.0]), exact, plain).ok
        assert compare("y", torch.tensor([bad, 2.0]), torch.tensor([bad, 2.0]), plain).ok
    assert not compare("y", torch.ones(3), exact, plain).ok


def test_what_a_run_found_better_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "sm_90.json").write_text(json.dumps({"configs": {"a": {"n=1": {"x": 1}}}, "order": {"a": {}}}))
    rows = [
        {"kind": "machine", "arch": "sm_90"},
        {"kind": "tuned", "op": "a", "bucket": "n=2", "values": {"x": 2}},
        {"kind": "tuned", "op": "b", "bucket": "n=2", "values": {}},
    ]
    table = json.loads(ship(rows, tmp_path).read_text())
    assert table == {"configs": {"a": {"n=1": {"x": 1}, "n=2": {"x": 2}}}, "order": {"a": {}}}


def test_tuning_keeps_the_fastest_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runtime, "arch", lambda device=None: "sm_90")
    tuning.rule("op.tuned")(lambda arch, facts: {"block": 1})
    tuning.tries("op.tuned")(lambda arch, facts: [{"block": n} for n in (8, 4, 2)])
    used: list[int] = []

    class Slower:
        def together(self, calls: dict[str, Callable[[], object]], round_s: float = 0.0) -> dict[str, Timed]:
            calls[""]()
            return {"": Timed({1: 1.0, 2: 0.8, 4: 0.5, 8: 0.9}[used[-1]], 0.0, True)}

    timer: Any = Slower()
    (row,) = tune(lambda: used.append(tuning.config("op.tuned", n=3)["block"]), timer, lambda: 100.0)
    assert row == {"op": "op.tuned", "bucket": "n=4", "values": {"block": 4}, "ms": 0.5, "default_ms": 1.0}
    assert tuning.config("op.tuned", n=4)["block"] == 4
    tuning._rules.pop("op.tuned"), tuning._tries.pop("op.tuned"), tuning._tables.cache_clear(), tuning._chosen.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "kernels.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "torch sees no NVIDIA GPU" in done.stderr


def test_a_fault_that_ends_the_process_is_gone_on_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("op", "right", right), Check("op", "broken", broken), Check("op", "after", right)]
    rows = Rows(tmp_path)
    monkeypatch.setattr("kernels.gpu.run._alive", lambda device: rows.of("check")[-1]["ok"])
    with pytest.raises(Dead, match="jsonl"):
        _check(rows, checks, CPU, Clock(1e6), 1e6)
    assert rows.of("dead")[0]["case"] == "check op/broken"
    rows._file.close()
    again = Rows(tmp_path, rows.path)
    monkeypatch.undo()
    failed, skipped = _check(again, checks, CPU, Clock(1e6), 1e6)
    assert not failed and not skipped
    assert [row["case"] for row in again.of("check")] == ["right", "broken", "after"]
    whole = json.loads(again.close().read_text())["rows"]
    assert [row["kind"] for row in whole] == ["check", "check", "dead", "check"]
