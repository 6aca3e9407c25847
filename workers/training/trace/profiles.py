"""One step under torch's profiler, or under a memory tracker, and the file that comes of it.

Knows torch's tools; does not know who asks, or where files go from here.
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

# MemTracker's words for what it finds, and the engine's
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

Tell = Callable[[Path, dict[str, Any]], None]


@contextmanager
def profiled(path: Path, tell: Tell) -> Iterator[None]:
    """A trace of the step for chrome://tracing or Perfetto, gzipped: operators with shapes,
    kernels, memory.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, profile_memory=True) as found:
        yield
    found.export_chrome_trace(str(path))
    tell(path, {})


@contextmanager
def memory_tracked(
    path: Path, tell: Tell, *, parts: Sequence[nn.Module], optimizer: Optimizer, by_module: bool
) -> Iterator[None]:
    """Bytes by category at the step's peak, and of each module where wanted: counted from tensors,
    by MemTracker.
    """
    from workers.training.trace.memory_tracker import Tracker

    tracker = Tracker(by_module=by_module)
    tracker.track_external(*parts, optimizer)
    with tracker:
        yield
    peak = {
        str(device): {
            _CATEGORIES.get(_word(kind), _word(kind)): size for kind, size in found.items()
        }
        for device, found in tracker.get_tracker_snapshot("peak").items()
        if any(found.values())
    }
    path.write_text(json.dumps({"tool": "MemTracker", "peak": peak, "modules": tracker.modules()}))
    tell(path, {"tool": "MemTracker", "peak": peak})


@contextmanager
def memory_recorded(path: Path, tell: Tell, *, device: torch.device) -> Iterator[None]:
    """The CUDA allocator's counters, and its history over the step as a snapshot for
    pytorch.org/memory_viz.
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
    found = torch.cuda.memory_stats(device)
    names = (
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    )
    peak = {name.removesuffix("_bytes"): int(found.get(f"{name}.all.peak", 0)) for name in names}
    counts = {name: int(found.get(name, 0)) for name in ("num_alloc_retries", "num_ooms")}
    tell(path, {"tool": "torch.cuda.memory", "peak": {str(device): peak}, **counts})


def _word(kind: Any) -> str:
    return str(getattr(kind, "value", kind))
