"""Rates of one device and of a group of ranks. Does not depend on processes or files.

Each is the best of several repetitions, after a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_GPU_SIDE, _CPU_SIDE = 8192, 512  # of the matrices
_GPU_COPY_BYTES, _CPU_COPY_BYTES = 2**30, 2**26
_GPU_REDUCE_BYTES, _CPU_REDUCE_BYTES = 2**28, 2**22
_REPETITIONS = 5


def matmul_flops(device: torch.device, *, side: int | None = None) -> float:
    """Floating-point operations per second of square products (2 n³ each)."""
    gpu = device.type == "cuda"
    n = side or (_GPU_SIDE if gpu else _CPU_SIDE)
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    out = torch.empty_like(a)
    return 2.0 * n**3 / best_s(lambda: torch.mm(a, a, out=out), device, calls=10 if gpu else 2)


def memory_bytes_per_s(device: torch.device, *, size: int | None = None) -> float:
    """Bytes read and written per second by copies within the device's memory."""
    gpu = device.type == "cuda"
    size = size or (_GPU_COPY_BYTES if gpu else _CPU_COPY_BYTES)
    source = torch.ones(size // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    seconds = best_s(lambda: target.copy_(source), device, calls=5 if gpu else 1)
    return 2.0 * source.nbytes / seconds


def all_reduce_bytes_per_s(
    group: dist.ProcessGroup | None, device: torch.device, *, size: int | None = None
) -> float:
    """Bus bandwidth of the group: 2 (n − 1) / n · bytes / time (nccl-tests, PERFORMANCE.md).

    All members call it together. The time is that of the slowest member.
    """
    ranks = dist.get_world_size(group)
    size = size or (_GPU_REDUCE_BYTES if device.type == "cuda" else _CPU_REDUCE_BYTES)
    values = torch.ones(size // 4, device=device, dtype=torch.float32)
    seconds = best_s(lambda: dist.all_reduce(values, group=group), device, calls=1)
    slowest = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return 2.0 * (ranks - 1) / ranks * values.nbytes / float(slowest.item())


def best_s(work: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """The least seconds per call over repetitions of `calls` calls."""
    best = float("inf")
    for repetition in range(_REPETITIONS + 1):
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronize(device)
        if repetition:  # the first is the warm-up
            best = min(best, (time.perf_counter() - begin) / calls)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
