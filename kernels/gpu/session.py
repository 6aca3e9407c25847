"""One run on a GPU, by its own clock: limits, correctness, benchmarks in order of rank, then
tuning.

The GPU is used by processes of their own: checks run side by side, as most of their time is
compilation; what is timed
runs alone. A case that breaks or hangs its process costs that case; what the clock leaves undone is
told as skipped.
Knows cases by name, no operation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.gpu.cases import Bench, Check, cases
from kernels.gpu.result_rows import Rows
from kernels.gpu.worker_pool import NOT_REACHED, Workers
from kernels.gpu.worker_process import Answer, Job

CHECKS_UNTIL = 0.5  # of the budget; checks that were not reached by then are skipped
WARM_UNTIL = 0.65  # of the budget: what is not compiled by then is compiled when it is timed
CHECK_S, WARM_S, BENCH_S, TUNE_S = 150.0, 120.0, 60.0, 60.0  # a case that takes longer hangs
LEAST_S = 8.0  # below which no benchmark begins


class Clock:
    """How much of the budget is left."""

    def __init__(self, budget_s: float) -> None:
        self._start = time.monotonic()
        self.budget_s = budget_s

    def used_s(self) -> float:
        return time.monotonic() - self._start

    def left_s(self) -> float:
        return self.budget_s - self.used_s()

    def until(self, share: float) -> Callable[[], float]:
        """What is left of this share of the budget, told anew at each call."""
        return lambda: share * self.budget_s - self.used_s()


def processes() -> int:
    """How many processes check and compile at a time: all cores but two, 12 at most."""
    return max(1, min(12, (os.cpu_count() or 3) - 2))


def run(
    out: Path,
    budget_s: float,
    only: str | None = None,
    *,
    device: str = "cuda",
    source: str = "kernels.gpu",
    context: str = "spawn",
    most: int | None = None,
) -> tuple[Path, list[str]]:
    """(file of the rows, sentences about failed checks).

    Raises NoWorker where no process can use the device.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each process compiles for itself
    begun = _Run(Rows(out), Clock(budget_s), Workers(device, source, context), most or processes())
    try:
        begun.through(*cases(only, source))
    finally:
        path = begun.end()
    return path, begun.failed


class _Run:
    def __init__(self, rows: Rows, clock: Clock, workers: Workers, most: int) -> None:
        self._rows, self._clock, self._workers, self._most = rows, clock, workers, most
        self.failed: list[str] = []
        self._skipped: list[str] = []
        self._limits: dict[str, Any] | None = None
        self._broke: dict[Bench, str] = {}  # how a benchmark ended its process, without peers too
        self._alone: set[Bench] = set()  # those that did with peers

    def through(self, checks: list[Check], benches: list[Bench]) -> None:
        self._measure_limits()
        self._check(checks)
        self._warm(benches)
        self._workers.keep(1)
        for bench in benches:
            self._bench(bench)
        for bench in benches:
            self._tune(bench)

    def end(self) -> Path:
        self._workers.close()
        seconds = round(self._clock.used_s(), 1)
        self._rows.write("end", seconds=seconds, skipped=self._skipped, failed=self.failed)
        return self._rows.close()

    def _measure_limits(self) -> None:
        answer = self._workers.one(Job("limits", limit_s=CHECK_S), self._clock.left_s)
        self._take(answer, "limits")
        self._limits = next((values for kind, values in answer.rows if kind == "limits"), None)

    def _check(self, checks: list[Check]) -> None:
        jobs = [Job("check", c.op, c.case, CHECK_S) for c in checks]
        for job, answer in self._workers.each(jobs, self._most, self._clock.until(CHECKS_UNTIL)):
            if answer.lost == NOT_REACHED:
                self._skipped.append(
                    f"{job.name}: correctness not reached in its share of the time"
                )
                continue
            rows = dict(answer.rows)
            if "check" not in rows:
                message = [f"{job.name}: {answer.lost or '; '.join(answer.skipped)}"]
                rows["check"] = {
                    "op": job.op,
                    "case": job.case,
                    "ok": False,
                    "compared": [],
                    "failed": message,
                }
            row = rows["check"]
            self._rows.write("check", **row)
            self.failed += row["failed"]
            print(
                f"{'ok    ' if row['ok'] else 'FAILED'} {job.name}",
                *row["failed"],
                sep="\n       ",
                flush=True,
            )

    def _warm(self, benches: list[Bench]) -> None:
        """What benchmarks compile, compiled side by side; peers through torch.compile take seconds
        each. What breaks or
        hangs its process here does not do it again where it would cost the run's own time."""
        if self._most == 1:
            return
        self._alone = set(self._broken(benches, peers=True))
        self._broke = self._broken([b for b in benches if b in self._alone], peers=False)

    def _broken(self, benches: list[Bench], *, peers: bool) -> dict[Bench, str]:
        """The benchmarks that ended their process, and how; other faults are told when they are
        timed.
        """
        named = {(b.op, b.case): b for b in benches}
        jobs = [Job("warm", b.op, b.case, WARM_S, {"peers": peers}) for b in benches]
        found = {}
        for job, answer in self._workers.each(jobs, self._most, self._clock.until(WARM_UNTIL)):
            if answer.lost != NOT_REACHED and (answer.lost or not answer.sound):
                found[named[job.op, job.case]] = answer.lost or "the GPU answered no more"
        return found

    def _bench(self, bench: Bench) -> None:
        name = f"{bench.op}/{bench.case}"
        if self._clock.left_s() < LEAST_S:
            self._skipped.append(f"{name}: no time left")
            return
        if bench in self._broke:
            self._skipped.append(f"{name}: when it was run to be compiled: {self._broke[bench]}")
            return
        for peers in (False,) if bench in self._alone else (True, False):
            given = {"limits": self._limits, "peers": peers}
            limit_s = BENCH_S if self._most > 1 else WARM_S  # compiled already, or not
            answer = self._workers.one(
                Job("bench", bench.op, bench.case, limit_s, given), self._clock.left_s
            )
            self._take(answer, name)
            if answer.rows or answer.lost == NOT_REACHED or (answer.sound and not answer.lost):
                return  # else a peer may have broken the process: once more without any

    def _tune(self, bench: Bench) -> None:
        left_s = self._clock.left_s() - 2.0
        if left_s > LEAST_S:
            given = {"left_s": min(left_s, TUNE_S)}
            job = Job("tune", bench.op, bench.case, TUNE_S + 10.0, given)
            self._take(
                self._workers.one(job, self._clock.left_s), f"tuning {bench.op}/{bench.case}"
            )

    def _take(self, answer: Answer, name: str) -> None:
        for kind, values in answer.rows:
            self._rows.write(kind, **values)
            print(_line(kind, values), flush=True)
        self._skipped += answer.skipped
        if answer.lost:
            self._skipped.append(f"{name}: {answer.lost}")


def _line(kind: str, values: dict[str, Any]) -> str:
    """A row as a person reads it while it runs."""
    if kind == "bench":
        beside = (
            f"{values['peer']} {values['peer_ms']:.4f} ms, {values['ratio']:.2f}x"
            if values["peer"]
            else ""
        )
        share = (
            f"{values['fraction']:.0%} of {values['bound']}"
            if values["fraction"] is not None
            else values["bound"]
        )
        return f"{values['op']}/{values['case']}: {values['ms']:.4f} ms, {share}; {beside}"
    if kind == "tuned":
        return (
            f"{values['case']}: {values['op']} {values['default_ms']:.4f} -> {values['ms']:.4f} ms"
        )
    return f"{kind}: {values}"
