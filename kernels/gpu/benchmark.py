"""Runs one benchmark: times our call and its peers, and builds its rows with shares of the
machine's limits.

A peer that cannot be created, called or timed is skipped with its reason; only our call decides
whether there are rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.dispatch import clear_records, explain
from kernels.gpu.cases import Bench
from kernels.gpu.machine_limits import Limits
from kernels.gpu.timing import Timer

Row = dict[str, Any]


def bench(
    case: Bench, device: torch.device, timer: Timer, limits: Limits | None, *, peers: bool = True
) -> tuple[list[Row], list[str]]:
    """(one row per peer, or one without peers; skipped peers with reasons). `ran`: dispatch's
    choice for our call.
    """
    name = f"{case.op}/{case.case}"
    clear_records()
    work = case.make(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = work.ours()
    torch.cuda.synchronize(device)
    # in addition to the results
    extra_bytes = torch.cuda.max_memory_allocated(device) - before - _bytes(results)
    del results
    ran = [{key: row[key] for key in ("op", "backend", "reason")} for row in explain()]
    prepared = {"": timer.prepared(work.ours)}
    skipped = []
    for peer, make in work.peers.items() if peers else ():
        try:
            prepared[peer] = timer.prepared(make())
        except Exception as error:
            # raises if the fault broke the process: then nothing can be timed here
            torch.cuda.synchronize(device)
            skipped.append(f"{name} against {peer}: {type(error).__name__}: {str(error)[:200]}")
    times = timer.times(prepared, reads=work.reads)
    ours = times.pop("")
    seconds = ours.ms / 1e3
    shared: Row = {
        "op": case.op,
        "case": case.case,
        "goal": case.goal,
        "backend": case.backend,
        "ran": ran,
        "ms": ours.ms,
        "spread": ours.spread,
        "graphed": ours.graphed,
        "bytes": work.bytes,
        "flops": work.flops,
        "gb_per_s": work.bytes / seconds / 1e9,
        "tflops": work.flops / seconds / 1e12,
        "bound": work.bound,
        "fraction": limits.fraction(work.bound, work.bytes, work.flops, seconds)
        if limits
        else None,
        "extra_bytes": extra_bytes,
    }
    rows = [
        {**shared, "peer": peer, "peer_ms": t.ms, "peer_spread": t.spread, "ratio": t.ms / ours.ms}
        for peer, t in times.items()
    ]
    return rows or [
        {**shared, "peer": None, "peer_ms": None, "peer_spread": None, "ratio": None}
    ], skipped


def _bytes(results: Any) -> int:
    """Bytes of the tensors that a call returned."""
    if isinstance(results, torch.Tensor):
        return results.nbytes
    return sum(_bytes(item) for item in results) if isinstance(results, (tuple, list)) else 0
