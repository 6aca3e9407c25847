"""The bench of elastic runs attributes CPU time to the programs that nodes start."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bench.bench_elastic import part_of
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command
from workers.launcher.rundir import RunDir


def test_the_command_lines_of_a_start_are_recognized(tmp_path: Path) -> None:
    order = LaunchOrder.from_dict(
        {
            **{"run": "7", "kind": "train", "attempt": 2, "attempt_id": "9", "fence": "f0"},
            **{"spec": {"kind": "train"}, "local_devices": [0], "local_ranks": 1},
            **{"world_size": 1, "run_dir": "runs/7/attempt-2"},
        }
    )
    run_dir = RunDir(tmp_path / "runs" / "7" / "attempt-2")
    rank, _ = command.program(order, run_dir)
    torchrun = command.torchrun(order, run_dir, host="127.0.0.1", port=1, local_address="127.0.0.1")
    supervisor = [sys.executable, "-m", "workers.launcher", "--dir", str(run_dir.path)]
    assert [part_of(words) for words in (supervisor, torchrun, rank)] == [
        "supervisor",
        "torchrun",
        "rank",
    ]
    wrapper = torchrun[torchrun.index("--no-python") + 1 :]
    assert part_of(wrapper) == ""
