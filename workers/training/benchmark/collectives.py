"""Times collectives and sends between the ranks by message size, and derives the link's bandwidth.

Bus bandwidth as in NCCL's tests (github.com/NVIDIA/nccl-tests, PERFORMANCE.md): the rate at which
each rank's link carries bytes, comparable between collectives and numbers of ranks. Does not depend
on models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from workers.contracts.catalog.units import KIB
from workers.training.parallel.mesh import World

_CPU_SIZES = tuple(4 * KIB * 4**power for power in range(8))  # 4 KiB to 64 MiB
_GPU_SIZES = tuple(4 * KIB * 4**power for power in range(10))  # to 1 GiB
_LEAST_S, _MOST_CALLS = 0.05, 30  # per size: minimum time and maximum calls


def measure_collectives(
    world: World,
    *,
    local_world_size: int,
    mark_progress: Callable[[], None],
    sizes: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
) -> dict[str, Any]:
    """`{ranks, rows, link}`, collective over the world; calls `mark_progress` at every size.

    `sizes` and `kinds` select some; `link` needs a gather or a scatter.

    Rows: `{kind, bytes, seconds, bus_bytes_per_s}`; `bytes` is the full message (gathered, or to be
    scattered), `seconds` the slowest rank's median. `link` is the planner's input.
    """
    sizes = sizes or (_GPU_SIZES if world.device.type == "cuda" else _CPU_SIZES)
    rows = []
    for kind in kinds or _CALLS:
        for size in sizes:
            mark_progress()
            seconds = _seconds(world, _CALLS[kind](world, size // 4 // world.size * world.size))
            share = _SHARES[kind](world.size)
            rows.append(
                {
                    "kind": kind,
                    "bytes": size,
                    "seconds": seconds,
                    "bus_bytes_per_s": share * size / seconds,
                }
            )
    return {"ranks": world.size, "rows": rows, "link": link(rows, world.size, local_world_size)}


def link(rows: list[dict[str, Any]], ranks: int, local: int) -> dict[str, Any] | None:
    """`{where, bytes_per_s, latency_s}` of the link that these rings used; None if they used two
    kinds.

    Bandwidth: the median over kinds at the largest size. Latency: one pass of a ring with the
    smallest message, divided as the planner counts it: by 1 + ranks/4 inside a node, log2(nodes)
    between nodes.
    """
    if local not in (1, ranks):
        return None
    passes = [each for each in rows if each["kind"] in ("all_gather", "reduce_scatter")]
    largest, smallest = max(each["bytes"] for each in rows), min(each["bytes"] for each in rows)
    rates = [
        each["bus_bytes_per_s"]
        for each in rows
        if each["bytes"] == largest and each["kind"] != "send_recv"
    ]
    first = median(each["seconds"] for each in passes if each["bytes"] == smallest)
    inside = local == ranks
    steps = 1 + ranks / 4 if inside else max(1.0, math.log2(ranks))
    return {
        "where": "intra" if inside else "inter",
        "bytes_per_s": median(rates),
        "latency_s": first / steps,
    }


def _seconds(world: World, call: Callable[[], Any]) -> float:
    """Median of several calls that start together; all ranks get the slowest rank's."""
    call()  # buffers and connections
    first = _slowest(world, _timed(world, call))  # all ranks must make the same number of calls
    calls = int(min(_MOST_CALLS, max(3.0, _LEAST_S / max(first, 1e-9))))
    return _slowest(world, median(_timed(world, call) for _ in range(calls)))


def _slowest(world: World, seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _timed(world: World, call: Callable[[], Any]) -> float:
    world.barrier()
    started = time.perf_counter()
    call()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - started


def _all_reduce(world: World, count: int) -> Callable[[], Any]:
    values = torch.ones(count, device=world.device)
    # a sum would grow out of range over many calls
    return lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX)


def _all_gather(world: World, count: int) -> Callable[[], Any]:
    whole, mine = (
        torch.empty(count, device=world.device),
        torch.ones(count // world.size, device=world.device),
    )
    return lambda: dist.all_gather_into_tensor(whole, mine)


def _reduce_scatter(world: World, count: int) -> Callable[[], Any]:
    whole, mine = (
        torch.ones(count, device=world.device),
        torch.empty(count // world.size, device=world.device),
    )
    return lambda: dist.reduce_scatter_tensor(mine, whole)


def _all_to_all(world: World, count: int) -> Callable[[], Any]:
    sent, got = torch.ones(count, device=world.device), torch.empty(count, device=world.device)
    return lambda: dist.all_to_all_single(got, sent)


def _send_recv(world: World, count: int) -> Callable[[], Any]:
    """Every rank sends to the next one, as pipeline stages and context-parallel rings do."""
    sent, got = torch.ones(count, device=world.device), torch.empty(count, device=world.device)

    def call() -> None:
        there, here = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, there), dist.P2POp(dist.irecv, got, here)]
        ):
            work.wait()

    return call


_CALLS: dict[str, Callable[[World, int], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "send_recv": lambda ranks: 1.0,
}
