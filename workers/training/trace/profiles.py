"""Context managers that profile one step, by torch's profiler or a memory tracker, into a file.

Does not depend on who requests profiles or where files are sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

# MemTracker's categories and the engine's
_CATEGORIES = {
    "Parameter": "params",
    "Buffer": "buffers",
    "Gradient": "grads",
    "Activation": "activations",
    "Temp": "temporary",
    "Optstate": "optimizer",
    "Total": "total",
}
_HISTORY = 200_000  # allocations that a CUDA snapshot keeps

Report = Callable[[Path, dict[str, Any]], None]


@contextmanager
def profile_step(path: Path, report: Report) -> Iterator[None]:
    """Write a gzipped Chrome or Perfetto trace of the step: operators with shapes, kernels,
    memory.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
    report(path, {})


@contextmanager
def track_memory(
    path: Path, report: Report, *, parts: Sequence[nn.Module], optimizer: Optimizer, by_module: bool
) -> Iterator[None]:
    """Write bytes by category at the step's peak, and per module if requested, counted by
    MemTracker.
    """
    from workers.training.trace.memory_tracker import MemoryTracker

    tracker = MemoryTracker(by_module=by_module)
    tracker.track_external(*parts, optimizer)
    with tracker:
        yield
    peak = {
        str(device): {
            _CATEGORIES.get(_kind_name(kind), _kind_name(kind)): size
            for kind, size in sizes.items()
        }
        for device, sizes in tracker.get_tracker_snapshot("peak").items()
        if any(sizes.values())
    }
    path.write_text(json.dumps({"tool": "MemTracker", "peak": peak, "modules": tracker.modules()}))
    report(path, {"tool": "MemTracker", "peak": peak})


@contextmanager
def record_memory(path: Path, report: Report, *, device: torch.device) -> Iterator[None]:
    """Write the CUDA allocator's history over the step, a snapshot for pytorch.org/memory_viz.

    `report` also gets the allocator's counters.
    """
    memory: Any = torch.cuda.memory
    torch.cuda.reset_peak_memory_stats(device)
    memory._record_memory_history(max_entries=_HISTORY)
    try:
        yield
        torch.cuda.synchronize(device)
        memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)
    stats = torch.cuda.memory_stats(device)
    names = (
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    )
    peak = {name.removesuffix("_bytes"): int(stats.get(f"{name}.all.peak", 0)) for name in names}
    counts = {name: int(stats.get(name, 0)) for name in ("num_alloc_retries", "num_ooms")}
    report(path, {"tool": "torch.cuda.memory", "peak": {str(device): peak}, **counts})


def _kind_name(kind: Any) -> str:
    return str(getattr(kind, "value", kind))
