"""One run on a GPU within a time budget: limits, correctness, benchmarks in order of rank, then
tuning.

Worker processes use the GPU. Checks run in parallel, because they mostly compile; timed calls run
alone. A case that breaks or hangs its process costs only that case; cases without time left are
reported as skipped. Does not depend on any operation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.gpu.cases import Bench, Check, cases
from kernels.gpu.result_rows import ResultRows
from kernels.gpu.worker_pool import NOT_REACHED, WorkerPool
from kernels.gpu.worker_process import Answer, Job

CHECKS_UNTIL = 0.5  # of the budget; checks not reached by then are skipped
WARM_UNTIL = 0.65  # of the budget; what is not compiled by then is compiled when it is timed
CHECK_S, WARM_S, BENCH_S, TUNE_S = 150.0, 120.0, 60.0, 60.0  # a case that takes longer hangs
LEAST_S = 8.0  # below which no benchmark starts


class Clock:
    """The remaining time of the budget."""

    def __init__(self, budget_s: float) -> None:
        self._start = time.monotonic()
        self.budget_s = budget_s

    def used_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left_s(self) -> float:
        """Remaining seconds of the budget."""
        return self.budget_s - self.used_s()

    def until(self, share: float) -> Callable[[], float]:
        """A function that returns the remaining time of this share of the budget."""
        return lambda: share * self.budget_s - self.used_s()


def processes() -> int:
    """Number of processes that check and compile at a time: all cores but two, 12 at most."""
    return max(1, min(12, (os.cpu_count() or 3) - 2))


def run(
    out: Path,
    budget_s: float,
    only: str | None = None,
    *,
    device: str = "cuda",
    source: str = "kernels.gpu",
    context: str = "spawn",
    max_processes: int | None = None,
) -> tuple[Path, list[str]]:
    """(file of the rows, messages of failed checks). Raises NoWorker if no process can use the
    device.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each process compiles for itself
    session = _Session(
        ResultRows(out),
        Clock(budget_s),
        WorkerPool(device, source, context),
        max_processes or processes(),
    )
    try:
        session.run_all(*cases(only, source))
    finally:
        path = session.finish()
    return path, session.failed


class _Session:
    def __init__(
        self, rows: ResultRows, clock: Clock, workers: WorkerPool, max_processes: int
    ) -> None:
        self._rows, self._clock, self._workers, self._most = rows, clock, workers, max_processes
        self.failed: list[str] = []
        self._skipped: list[str] = []
        self._limits: dict[str, Any] | None = None
        self._broken_alone: dict[
            Bench, str
        ] = {}  # how a benchmark ended its process, even without peers
        self._broken_with_peers: set[Bench] = (
            set()
        )  # benchmarks that ended their process with peers

    def run_all(self, checks: list[Check], benches: list[Bench]) -> None:
        self._measure_limits()
        self._check(checks)
        self._warm(benches)
        self._workers.stop_extra(1)
        for bench in benches:
            self._bench(bench)
        for bench in benches:
            self._tune(bench)

    def finish(self) -> Path:
        self._workers.close()
        seconds = round(self._clock.used_s(), 1)
        self._rows.write("end", seconds=seconds, skipped=self._skipped, failed=self.failed)
        return self._rows.close()

    def _measure_limits(self) -> None:
        answer = self._workers.run_job(Job("limits", limit_s=CHECK_S), self._clock.left_s)
        self._record(answer, "limits")
        self._limits = next((values for kind, values in answer.rows if kind == "limits"), None)

    def _check(self, checks: list[Check]) -> None:
        jobs = [Job("check", c.op, c.case, CHECK_S) for c in checks]
        for job, answer in self._workers.run_jobs(
            jobs, self._most, self._clock.until(CHECKS_UNTIL)
        ):
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
        """Compiles the benchmarks' kernels in parallel; peers with torch.compile take seconds each.
        A benchmark that breaks or hangs its process here does not do so again in the timed part.
        """
        if self._most == 1:
            return
        self._broken_with_peers = set(self._find_broken(benches, peers=True))
        self._broken_alone = self._find_broken(
            [b for b in benches if b in self._broken_with_peers], peers=False
        )

    def _find_broken(self, benches: list[Bench], *, peers: bool) -> dict[Bench, str]:
        """The benchmarks that ended their process, and how; other faults are reported when they are
        timed.
        """
        named = {(b.op, b.case): b for b in benches}
        jobs = [Job("warm", b.op, b.case, WARM_S, {"peers": peers}) for b in benches]
        broken = {}
        for job, answer in self._workers.run_jobs(jobs, self._most, self._clock.until(WARM_UNTIL)):
            if answer.lost != NOT_REACHED and (answer.lost or not answer.sound):
                broken[named[job.op, job.case]] = answer.lost or "the GPU stopped responding"
        return broken

    def _bench(self, bench: Bench) -> None:
        name = f"{bench.op}/{bench.case}"
        if self._clock.left_s() < LEAST_S:
            self._skipped.append(f"{name}: no time left")
            return
        if bench in self._broken_alone:
            self._skipped.append(f"{name}: during compilation: {self._broken_alone[bench]}")
            return
        for peers in (False,) if bench in self._broken_with_peers else (True, False):
            args = {"limits": self._limits, "peers": peers}
            limit_s = BENCH_S if self._most > 1 else WARM_S  # already compiled, or not
            answer = self._workers.run_job(
                Job("bench", bench.op, bench.case, limit_s, args), self._clock.left_s
            )
            self._record(answer, name)
            if answer.rows or answer.lost == NOT_REACHED or (answer.sound and not answer.lost):
                return  # else a peer may have broken the process: retry without peers

    def _tune(self, bench: Bench) -> None:
        left_s = self._clock.left_s() - 2.0
        if left_s > LEAST_S:
            args = {"left_s": min(left_s, TUNE_S)}
            job = Job("tune", bench.op, bench.case, TUNE_S + 10.0, args)
            self._record(
                self._workers.run_job(job, self._clock.left_s), f"tuning {bench.op}/{bench.case}"
            )

    def _record(self, answer: Answer, name: str) -> None:
        for kind, values in answer.rows:
            self._rows.write(kind, **values)
            print(_format_row(kind, values), flush=True)
        self._skipped += answer.skipped
        if answer.lost:
            self._skipped.append(f"{name}: {answer.lost}")


def _format_row(kind: str, values: dict[str, Any]) -> str:
    """A row as text for the console."""
    if kind == "bench":
        peer_text = (
            f"{values['peer']} {values['peer_ms']:.4f} ms, {values['ratio']:.2f}x"
            if values["peer"]
            else ""
        )
        share = (
            f"{values['fraction']:.0%} of {values['bound']}"
            if values["fraction"] is not None
            else values["bound"]
        )
        return f"{values['op']}/{values['case']}: {values['ms']:.4f} ms, {share}; {peer_text}"
    if kind == "tuned":
        return (
            f"{values['case']}: {values['op']} {values['default_ms']:.4f} -> {values['ms']:.4f} ms"
        )
    return f"{kind}: {values}"
