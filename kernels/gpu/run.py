"""One run on a GPU, by its own clock: limits, correctness, benchmarks in order of rank, then tuning.

What the clock leaves undone is told as skipped. A fault that the process cannot outlive (an illegal memory access)
ends with `Dead`; a new process goes on behind the case that did it. Knows cases, no operation.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import kernels.gpu
from kernels.dispatch import explain
from kernels.gpu.cases import Bench, Check
from kernels.gpu.limits import Limits, measure
from kernels.gpu.rows import Rows, machine
from kernels.gpu.timing import Timer
from kernels.gpu.tune import tune

CHECKS_SHARE = 0.5  # of the budget, at most, goes to correctness; checks beyond it are skipped


class Dead(RuntimeError):
    """The GPU answers this process no more; the text is the path of the rows so far."""


class Clock:
    """How much of the budget is left."""

    def __init__(self, budget_s: float) -> None:
        self._start = time.monotonic()
        self._budget_s = budget_s

    def used_s(self) -> float:
        return time.monotonic() - self._start

    def left_s(self) -> float:
        return self._budget_s - self.used_s()


def cases(only: str | None = None) -> tuple[list[Check], list[Bench]]:
    """All modules' checks and benchmarks, benchmarks in order of rank."""
    checks: list[Check] = []
    benches: list[Bench] = []
    for info in pkgutil.iter_modules(kernels.gpu.__path__, "kernels.gpu."):
        if info.name.endswith("__main__"):
            continue
        for case in getattr(importlib.import_module(info.name), "CASES", ()):
            if only is None or case.op == only:
                (checks if isinstance(case, Check) else benches).append(case)
    return checks, sorted(benches, key=lambda b: b.rank)


def run(out: Path, budget_s: float, only: str | None = None, begun: Path | None = None) -> tuple[Path, list[str]]:
    """(file of the rows, sentences about failed checks). `begun`: rows to go on behind. Raises Dead."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Graphs cannot be captured on the default stream. Never set back: after a fault that could raise another error.
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return _run(Rows(out, begun), Clock(budget_s), budget_s, device, only)


def _run(rows: Rows, clock: Clock, budget_s: float, device: torch.device, only: str | None) -> tuple[Path, list[str]]:
    timer = Timer(device)
    if known := rows.of("limits"):
        limits = Limits(**{name: value for name, value in known[0].items() if name != "kind"})
    else:
        rows.write("machine", **machine(device))
        limits = measure(device, timer)
        rows.write("limits", **vars(limits))
    checks, benches = cases(only)
    killers = {row["case"] for row in rows.of("dead")}
    failed = [sentence for row in rows.of("check") for sentence in row["failed"]]
    skipped = [sentence for row in rows.of("dead") for sentence in row["skipped"]]
    more = _check(rows, checks, device, clock, budget_s)
    failed, skipped = failed + more[0], skipped + more[1]
    measured = {(row["op"], row["case"]) for row in rows.of("bench")}
    for bench in benches:
        name = f"{bench.op}/{bench.case}"
        if (bench.op, bench.case) in measured or f"bench {name}" in killers:
            continue
        if clock.left_s() < 8:
            skipped.append(f"{name}: no time left")
            continue
        skipped += _bench(rows, bench, device, timer, limits)
        _go_on_or_die(rows, f"bench {name}", device, skipped)
    for bench in benches:
        name = f"tuning {bench.op}/{bench.case}"
        if clock.left_s() > 10 and not {name, name.replace("tuning", "bench", 1)} & killers:
            skipped += _tune(rows, bench, device, timer, clock)
            _go_on_or_die(rows, name, device, skipped)
    for record in explain():
        rows.write("dispatch", **record)
    rows.write("end", seconds=round(clock.used_s(), 1), skipped=skipped, failed=failed)
    return rows.close(), failed


def _check(
    rows: Rows, checks: list[Check], device: torch.device, clock: Clock, budget_s: float
) -> tuple[list[str], list[str]]:
    """(sentences about what is wrong, what was not reached) of the checks that have no row yet."""
    failed: list[str] = []
    skipped: list[str] = []
    done = {(row["op"], row["case"]) for row in rows.of("check")}
    for check in checks:
        name = f"{check.op}/{check.case}"
        if (check.op, check.case) in done:
            continue
        if clock.used_s() > CHECKS_SHARE * budget_s:
            skipped.append(f"{name}: correctness not reached in its share of the time")
            continue
        try:
            compared = check.run(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a fault of this check, and not of the next
            wrong = [f"{name}: {c.what}: error {c.error:.3g}, allowed {c.allowed:.3g}" for c in compared if not c.ok]
            if not compared:
                wrong = [f"{name}: compared nothing"]
            results = [{"what": c.what, "error": c.error, "allowed": c.allowed} for c in compared]
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            wrong, results = [f"{name}: {type(error).__name__} at {where}: {str(error)[:300]}"], []
        rows.write("check", op=check.op, case=check.case, ok=not wrong, compared=results, failed=wrong)
        print(f"{'ok    ' if not wrong else 'FAILED'} {name}", *wrong, sep="\n       " if wrong else "", flush=True)
        failed += wrong
        _go_on_or_die(rows, f"check {name}", device, skipped)
    return failed, skipped


def _bench(rows: Rows, bench: Bench, device: torch.device, timer: Timer, limits: Limits) -> list[str]:
    """Times one benchmark and writes a row for each peer; gives what was skipped and why."""
    name = f"{bench.op}/{bench.case}"
    skipped: list[str] = []
    try:
        torch.manual_seed(0)
        work = bench.make(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        made = work.ours()
        torch.cuda.synchronize(device)
        extra_bytes = torch.cuda.max_memory_allocated(device) - before - _bytes(made)  # beside what it is asked for
        del made
        calls = {"": work.ours}
        for peer, make in work.peers.items():
            try:
                call = make()
                call()
                calls[peer] = call
            except Exception as error:
                skipped.append(f"{name} against {peer}: {type(error).__name__}: {str(error)[:200]}")
        times = timer.together(calls, reads=work.reads)
    except Exception as error:
        return [*skipped, f"{name}: {type(error).__name__}: {str(error)[:300]}"]
    ours = times.pop("")
    seconds = ours.ms / 1e3
    shared = {
        "op": bench.op,
        "case": bench.case,
        "goal": bench.goal,
        "backend": bench.backend,
        "ms": ours.ms,
        "spread": ours.spread,
        "graphed": ours.graphed,
        "bytes": work.bytes,
        "flops": work.flops,
        "gb_per_s": work.bytes / seconds / 1e9,
        "tflops": work.flops / seconds / 1e12,
        "bound": work.bound,
        "fraction": limits.fraction(work.bound, work.bytes, work.flops, seconds),
        "extra_bytes": extra_bytes,
    }
    for peer, timed in times.items():
        ratio = timed.ms / ours.ms
        rows.write("bench", **shared, peer=peer, peer_ms=timed.ms, peer_spread=timed.spread, ratio=ratio)
        print(f"{name}: {ours.ms:.4f} ms, {peer} {timed.ms:.4f} ms, {ratio:.2f}x", flush=True)
    if not times:
        rows.write("bench", **shared, peer=None, peer_ms=None, peer_spread=None, ratio=None)
        print(f"{name}: {ours.ms:.4f} ms, {shared['gb_per_s']:.0f} GB/s", flush=True)
    return skipped


def _tune(rows: Rows, bench: Bench, device: torch.device, timer: Timer, clock: Clock) -> list[str]:
    """Tries other launch configurations for one benchmark and writes a row for each operation behind it."""
    try:
        torch.manual_seed(0)
        for row in tune(bench.make(device).ours, timer, clock.left_s):
            rows.write("tuned", case=f"{bench.op}/{bench.case}", **row)
            print(f"{bench.op}/{bench.case}: {row['op']} {row['default_ms']:.4f} -> {row['ms']:.4f} ms", flush=True)
    except Exception as error:
        return [f"tuning {bench.op}/{bench.case}: {type(error).__name__}: {str(error)[:300]}"]
    return []


def _bytes(made: Any) -> int:
    """Of the tensors that a call gave."""
    if isinstance(made, torch.Tensor):
        return made.nbytes
    return sum(_bytes(one) for one in made) if isinstance(made, (tuple, list)) else 0


def _go_on_or_die(rows: Rows, name: str, device: torch.device, skipped: list[str]) -> None:
    """Frees what a case left; raises Dead where it broke the process's GPU, after a row that says which it was."""
    if not _alive(device):
        rows.write("dead", case=name, skipped=skipped)
        raise Dead(rows.path)
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU was used
    if "torch._dynamo" in sys.modules:  # or peers compiled 8 times over would run uncompiled, or for any shape
        torch._dynamo.reset()


def _alive(device: torch.device) -> bool:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
