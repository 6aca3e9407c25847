"""A GPU run without a GPU: rows are written as they come, failures have messages, and the time
budget holds.
"""

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
from kernels.gpu.cases import compare
from kernels.gpu.session import Clock, run
from kernels.gpu.timing import Timed
from kernels.gpu.tune import ship, tune
from kernels.gpu.worker_pool import NOT_REACHED, NoWorker, WorkerPool
from kernels.gpu.worker_process import Job

ROOT = Path(__file__).resolve().parents[2]
# forked, because importing torch takes seconds per process; none of the cases computes
HERE: dict[str, Any] = {"device": "cpu", "source": "tests.kernels.gpu_cases", "context": "fork"}
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_each_case_is_a_row_and_failures_have_messages(
    tmp_path: Path,
) -> None:
    path, failed = run(tmp_path, 60.0, "op", max_processes=2, **HERE)
    rows = json.loads(path.read_text())["rows"]
    assert path.suffix == ".json" and not list(tmp_path.glob("*.jsonl"))
    checks = {row["case"]: row for row in rows if row["kind"] == "check"}
    assert {case: row["ok"] for case, row in checks.items()} == {
        "right": True,
        "wrong": False,
        "broken": False,
        "nothing": False,
        "ends": False,
        "after": True,
    }
    assert sorted(failed) == sorted(
        sentence for row in checks.values() for sentence in row["failed"]
    )
    message = " ".join(failed)
    for words in (
        "op/wrong: y: error 0.5",
        "RuntimeError at gpu_cases.py:",
        "an illegal memory access",
        "op/nothing: compared nothing",
        "op/ends: its process ended, exit code 3",
    ):
        assert words in message
    end = rows[-1]
    assert end["kind"] == "end" and end["failed"] == failed
    assert any(s.startswith("bench op/unmade") and "too little memory" in s for s in end["skipped"])


def test_hanging_cases_are_stopped_and_unreached_cases_skipped(tmp_path: Path) -> None:
    workers = WorkerPool(**HERE)
    jobs = [Job("check", "slow", "hangs", 0.3), Job("check", "slow", "after", 20.0)]
    (first, late), (second, answer) = workers.run_jobs(jobs, 1, Clock(60.0).left_s)
    assert (first.case, second.case) == ("hangs", "after") and "longer than 0 s" in str(late.lost)
    assert answer.lost is None and answer.rows[0][1]["ok"]
    clock = Clock(0.5)
    record = [
        answer.lost
        for _, answer in workers.run_jobs(
            [Job("check", "slow", "hangs", 20.0), jobs[1]], 1, clock.left_s
        )
    ]
    workers.close()
    assert record == [NOT_REACHED, NOT_REACHED]
    path, failed = run(tmp_path, 0.0, "slow", max_processes=1, **HERE)
    skipped = json.loads(path.read_text())["rows"][-1]["skipped"]
    assert not failed and "slow/hangs: correctness not reached in its share of the time" in skipped


def test_an_unusable_device_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NoWorker, match="nonsense"):
        run(tmp_path, 30.0, "op", **(HERE | {"device": "nonsense"}))
    assert json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["rows"][-1]["kind"] == "end"


def test_errors_are_compared_with_plain_torch() -> None:
    exact, plain = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])
    assert compare("y", torch.tensor([1.19, 2.0]), exact, plain).ok
    assert not compare("y", torch.tensor([1.21, 2.0]), exact, plain).ok
    for bad in (float("nan"), float("inf")):
        assert not compare("y", torch.tensor([bad, 2.0]), exact, plain).ok
        assert compare("y", torch.tensor([bad, 2.0]), torch.tensor([bad, 2.0]), plain).ok
    assert not compare("y", torch.ones(3), exact, plain).ok


def test_faster_configurations_of_a_run_are_shipped(tmp_path: Path) -> None:
    (tmp_path / "sm_90.json").write_text(
        json.dumps({"configs": {"a": {"n=1": {"x": 1}}}, "order": {"a": {}}})
    )
    rows = [
        {"kind": "machine", "arch": "sm_90"},
        {"kind": "tuned", "op": "a", "bucket": "n=2", "values": {"x": 2}},
        {"kind": "tuned", "op": "b", "bucket": "n=2", "values": {}},
    ]
    table = json.loads(ship(rows, tmp_path).read_text())
    assert table == {"configs": {"a": {"n=1": {"x": 1}, "n=2": {"x": 2}}}, "order": {"a": {}}}


def test_tuning_saves_the_fastest_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runtime, "arch", lambda device=None: "sm_90")
    tuning.rule("op.tuned")(lambda arch, facts: {"block": 1})
    tuning.candidates("op.tuned")(lambda arch, facts: [{"block": n} for n in (8, 4, 2)])
    used: list[int] = []

    class Slower:
        def together(
            self, calls: dict[str, Callable[[], object]], round_s: float = 0.0
        ) -> dict[str, Timed]:
            calls[""]()
            return {"": Timed({1: 1.0, 2: 0.8, 4: 0.5, 8: 0.9}[used[-1]], 0.0, True)}

    timer: Any = Slower()
    (row,) = tune(
        lambda: used.append(tuning.config("op.tuned", n=3)["block"]), timer, lambda: 100.0
    )
    assert row == {
        "op": "op.tuned",
        "bucket": "n=4",
        "values": {"block": 4},
        "ms": 0.5,
        "default_ms": 1.0,
    }
    assert tuning.config("op.tuned", n=4)["block"] == 4
    (
        tuning._rules.pop("op.tuned"),
        tuning._candidates.pop("op.tuned"),
        tuning._tables.cache_clear(),
        tuning._cached.clear(),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_without_a_gpu_it_reports_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "torch sees no NVIDIA GPU" in done.stderr
