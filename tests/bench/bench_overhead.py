"""CPU cost of telemetry and supervision in a training run with 15M parameters.

In the rank: points, events, beacon, time split, arrivals and norms by layer, in the training thread
and in their own threads, as a share of the process's CPU time. For the supervisor: CPU seconds
compared with one core. CPU time excludes other load.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.bench.record import record
from tests.flows.embedded import Orrery
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.metrics.throughput import Throughput
from workers.runtime.environment import read_environment
from workers.training.loop.memory_metrics import MemoryMetrics
from workers.training.loop.step_report import StepReport
from workers.training.loop.train import Loop
from workers.training.optim import Norms
from workers.training.parallel.arrival_skew import ArrivalTracker
from workers.training.setup.attempt import run_attempt
from workers.training.setup.control import Control
from workers.training.setup.spec_loading import accept
from workers.training.trace.step_trace import Trace
from workers.training.trace.time_breakdown import StepTimeBreakdown

STEPS, FIRST = 24, 4  # the first steps allocate memory
# outermost calls of the training thread; nested calls are included
CALLS = {
    "points and events": (Recorder, ("point", "event")),
    "beacon": (Beacon, ("mark",)),
    "time split": (StepTimeBreakdown, ("enter", "end_step", "read_oldest_step", "values")),
    "trace": (Trace, ("pipeline_times", "pipeline_values")),
    "arrivals": (ArrivalTracker, ("begin", "delays", "finish_step", "straggler")),
    "memory": (MemoryMetrics, ("values",)),
    "throughput": (Throughput, ("step", "values")),
    "control": (Control, ("poll",)),
    "step's numbers": (StepReport, ("read",)),
}
SPEC: dict[str, Any] = {
    "kind": "train",
    "model": "llama-15m",
    "plan": {"micro_batch_size": 2, "global_batch_size": 4},
    "train": {
        "steps": STEPS,
        "seq_len": 256,
        "seed": 1,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "log_every": 1,
    },
}


class CpuTime:
    """CPU seconds of the training thread by kind of call; nested calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside = self.on = False
        for name, (owner, methods) in CALLS.items():
            for method in methods:
                setattr(owner, method, self._timed(name, getattr(owner, method)))
        squares = Norms.squares
        weight_squares = self._timed("weights' norms", squares)
        # clipping needs the gradients' norms; the weights' norms are telemetry
        Norms.squares = lambda norms, each: (weight_squares if each[0].requires_grad else squares)(
            norms, each
        )  # type: ignore[method-assign]

    def _timed(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if (
                self.inside
                or not self.on
                or threading.current_thread() is not threading.main_thread()
            ):
                return call(*args, **kwargs)
            self.inside, began = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - began
                self.inside = False

        return timed


def main() -> None:
    measure_rank()
    measure_supervisor()


def measure_rank() -> None:
    """CPU time of telemetry inside the rank."""
    torch.set_num_threads(1)
    spent, began = CpuTime(), {}
    plain = Loop._one_step

    def one_step(loop: Loop) -> str | None:
        if loop.step == FIRST:
            began.update(process=time.process_time(), threads=_threads_s())
            spent.on = True
        request = plain(loop)
        if loop.step == STEPS:
            spent.on = False
            began.update(
                process=time.process_time() - began["process"],
                threads=_threads_s() - began["threads"],
            )
        return request

    Loop._one_step = one_step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_attempt(accept(SPEC), read_environment(Path(folder), env={}))
    assert outcome.exit_class == "ok", outcome.reason
    total_s = began["process"]
    parts = {**spent.seconds, "their threads": began["threads"]}
    record(
        "overhead",
        what=f"telemetry of the 15M model on one CPU, a point each step, {STEPS - FIRST} steps",
        value=sum(parts.values()) / total_s,
        unit="of CPU time",
        figure="<= 0.01",
        step_cpu_s=round(total_s / (STEPS - FIRST), 4),
        parts={name: round(seconds / total_s, 6) for name, seconds in parts.items()},
    )


def measure_supervisor() -> None:
    """The supervisor's CPU seconds while its rank trains, with all of Orrery running."""
    home = Path(tempfile.mkdtemp(prefix="orrery-bench-"))
    orrery = Orrery(home / "home", devices=1)
    orrery.start()
    try:
        run = orrery.submit({**SPEC, "train": {**SPEC["train"], "steps": 100_000}}, name="overhead")
        folder = orrery.home / "runs" / run / "attempt-1"
        orrery.until(partial(stepped, folder, FIRST), 600, "the first steps")
        files = {
            "supervisor": folder / "supervisor.json",
            "rank": folder / "rank-0" / "process.json",
        }
        processes = {
            name: psutil.Process(json.loads(file.read_text())["pid"])
            for name, file in files.items()
        }
        before, began = (
            {name: sum(process.cpu_times()[:2]) for name, process in processes.items()},
            time.monotonic(),
        )
        orrery.until(partial(stepped, folder, FIRST + STEPS), 600, "more steps")
        spent = {
            name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()
        }
        total_s = time.monotonic() - began
        assert orrery.client is not None
        orrery.client.post(f"runs/{run}/cancel")
        orrery.until_state(run, "cancelled", seconds=120)
    finally:
        orrery.close()
        shutil.rmtree(home, ignore_errors=True)
    record(
        "overhead",
        # row name since version 0.1
        what=f"the supervisor beside a rank of the 15M model, {STEPS} steps",
        value=spent["supervisor"] / total_s,
        unit="of a core",
        figure="<= 0.01",
        seconds=round(total_s, 2),
        **{f"{name}_s": round(seconds, 3) for name, seconds in spent.items()},
    )


def stepped(folder: Path, more_than: int) -> bool:
    path = folder / "rank-0" / "points.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > more_than


def _threads_s() -> float:
    """CPU seconds of the recorder's and the beacon's threads."""
    tick, total = os.sysconf("SC_CLK_TCK"), 0.0
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            fields = (
                Path(f"/proc/self/task/{thread.native_id}/stat")
                .read_text()
                .rpartition(")")[2]
                .split()
            )
            total += (int(fields[11]) + int(fields[12])) / tick
    return total


if __name__ == "__main__":
    main()
