"""The worker process: runs jobs on the GPU one after the other and reports each result.

A GPU fault (an illegal memory access) ends this process, not the run.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from kernels.gpu import benchmark
from kernels.gpu.cases import Bench, Check, cases
from kernels.gpu.machine_limits import Limits, measure
from kernels.gpu.result_rows import machine
from kernels.gpu.timing import Timer
from kernels.gpu.tune import tune

JobKind = Literal["limits", "check", "warm", "bench", "tune"]


@dataclass(frozen=True)
class Job:
    """A case, what to do with it, the time limit in seconds, and further arguments."""

    kind: JobKind
    op: str = ""
    case: str = ""
    limit_s: float = 120.0
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The case's name, or the kind of a job without a case."""
        return f"{self.op}/{self.case}" if self.op else self.kind


@dataclass(frozen=True)
class Answer:
    """Rows (kind, values) and skipped items. `lost`: how the process ended without an answer;
    `sound` False: its GPU no longer works.
    """

    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    sound: bool = True
    lost: str | None = None


def serve(line: Connection, device: str, source: str) -> None:
    """Sends whether the device can be used (None, or why not), then answers jobs until the
    connection is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run stops its processes itself
    try:
        worker = _Worker(torch.device(device), source)
    except Exception as error:
        line.send(_describe_error(error))
        return
    line.send(None)
    while True:
        try:
            job: Job = line.recv()
        except EOFError:
            return
        line.send(worker.answer(job))


class _Worker:
    def __init__(self, device: torch.device, source: str) -> None:
        if device.type == "cuda":
            device = torch.device(
                "cuda", torch.cuda.current_device() if device.index is None else device.index
            )
            torch.cuda.set_device(device)
            # Graphs cannot be captured on the default stream, and backward runs on its forward's
            # stream.
            torch.cuda.set_stream(torch.cuda.Stream(device))
            torch.zeros(1, device=device)
        self.device = device
        checks, benches = cases(source=source)
        self.checks = {(c.op, c.case): c for c in checks}
        self.benches = {(b.op, b.case): b for b in benches}
        self._timer: Timer | None = None

    @property
    def timer(self) -> Timer:
        self._timer = self._timer or Timer(self.device)
        return self._timer

    def answer(self, job: Job) -> Answer:
        do: dict[str, Callable[[Job], Answer]] = {
            "limits": self.limits,
            "check": self.check,
            "warm": self.warm,
            "bench": self.bench,
            "tune": self.tune,
        }
        try:
            torch.manual_seed(0)
            result = do[job.kind](job)
        except Exception as error:
            result = Answer(skipped=[f"{job.kind} {job.name}: {_describe_error(error)}"])
        return Answer(result.rows, result.skipped, self._sound())

    def limits(self, job: Job) -> Answer:
        rows: list[tuple[str, dict[str, Any]]] = [("machine", machine(self.device))]
        try:
            return Answer([*rows, ("limits", vars(measure(self.device, self.timer)))])
        except Exception as error:  # fractions are missing then; everything else works
            return Answer(rows, [f"limits: {_describe_error(error)}"])

    def check(self, job: Job) -> Answer:
        case: Check = self.checks[job.op, job.case]
        try:
            compared = case.run(self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            wrong = [
                f"{job.name}: {c.what}: error {c.error:.3g}, allowed {c.allowed:.3g}"
                for c in compared
                if not c.ok
            ]
            if not compared:
                wrong = [f"{job.name}: compared nothing"]
            results = [{"what": c.what, "error": c.error, "allowed": c.allowed} for c in compared]
        except Exception as error:
            wrong, results = [f"{job.name}: {_describe_error(error)}"], []
        row = {
            "op": job.op,
            "case": job.case,
            "ok": not wrong,
            "compared": results,
            "failed": wrong,
        }
        return Answer([("check", row)])

    def warm(self, job: Job) -> Answer:
        """Runs a benchmark's calls once, so that their compiled code is in the disk caches when
        they are timed.
        """
        work = self.benches[job.op, job.case].make(self.device)
        work.ours()
        for make in work.peers.values() if job.args["peers"] else ():
            try:
                make()()
            except Exception:  # reported when it is timed
                continue
        return Answer()

    def bench(self, job: Job) -> Answer:
        bench: Bench = self.benches[job.op, job.case]
        limits = Limits(**job.args["limits"]) if job.args["limits"] else None
        rows, skipped = benchmark.bench(
            bench, self.device, self.timer, limits, peers=job.args["peers"]
        )
        return Answer([("bench", row) for row in rows], skipped)

    def tune(self, job: Job) -> Answer:
        until = time.monotonic() + job.args["left_s"]
        work = self.benches[job.op, job.case].make(self.device)
        rows = tune(work.ours, self.timer, lambda: until - time.monotonic())
        return Answer([("tuned", {"case": job.name, **row}) for row in rows])

    def _sound(self) -> bool:
        """Frees the job's memory; False if it broke the process's GPU."""
        gc.collect()
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
        except RuntimeError:
            return False
        # else peers compiled 8 times would run uncompiled or with dynamic shapes
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        return True


def _describe_error(error: Exception) -> str:
    """An exception's type, place and first words."""
    rows = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(rows[-1].filename).name}:{rows[-1].lineno}" if rows else ""
    return f"{type(error).__name__}{where}: {str(error)[:300]}"
