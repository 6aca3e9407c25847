"""The peak that MFU is a fraction of: the catalogue's for GPUs it knows, else a measured matrix
product.

Does not know models. Peaks are FLOP/s of one device, dense, at the run's precision.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from workers.contracts.catalog import devices

_SIZE = 512
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Peak:
    """`flops` per second of one device and where the number comes from."""

    flops: float
    source: str
    device: str
    measured: bool


def device_peak(device: torch.device, precision: str, *, budget_s: float = 0.2) -> Peak:
    """Catalogue peak of the GPU under its driver's name, else `measured_peak`."""
    name = "cpu"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = devices.identify(properties.name, properties.total_memory)
        if known is not None:
            entry = devices.device(known)
            return Peak(entry.peak(precision) * 1e12, entry.source, known, measured=False)
        name = properties.name
    return Peak(
        measured_peak(device, precision, budget_s=budget_s), "matrix product", name, measured=True
    )


def measured_peak(device: torch.device, precision: str, *, budget_s: float) -> float:
    """FLOP/s of 512³ (GPU: 8192³) products over `budget_s`, the fastest tenth of them; call on all
    ranks at once.

    The fastest, because a peak is what the device can do while no neighbour takes its time (a mean,
    taken in a busy
    second, has let MFU come out above 1); all at once, because ranks share caches and memory.
    """
    size = _SIZE if device.type == "cpu" else 16 * _SIZE
    # fp16 and fp8 training on a CPU multiply in fp32: torch's fp16 products are many times slower
    # there
    dtype = (
        torch.float32
        if device.type == "cpu" and precision in ("fp16", "fp8")
        else _DTYPES[precision]
    )
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    left @ right
    _synchronise(device)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        left @ right
        _synchronise(device)
        times.append(time.perf_counter() - started)
    fastest = sorted(times)[: -(-len(times) // 10)]
    return 2.0 * size**3 * len(fastest) / sum(fastest)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
