"""The peak FLOP/s for MFU: the catalogue's for known GPUs, else of a measured matrix product.

Peaks are dense FLOP/s of one device at the run's precision.
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
    """FLOP/s of one device and the source of the number."""

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
    """FLOP/s of the fastest tenth of 512³ (GPU: 8192³) products during `budget_s`.

    The fastest ones show the device without other load (a mean during load has given an MFU above
    1). Call it on all ranks at the same time, because ranks share caches and memory.
    """
    size = _SIZE if device.type == "cpu" else 16 * _SIZE
    # fp16 and fp8 training on a CPU multiplies in fp32: torch's fp16 products are much slower
    dtype = (
        torch.float32
        if device.type == "cpu" and precision in ("fp16", "fp8")
        else _DTYPES[precision]
    )
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    left @ right
    _synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        left @ right
        _synchronize(device)
        times.append(time.perf_counter() - started)
    fastest = sorted(times)[: -(-len(times) // 10)]
    return 2.0 * size**3 * len(fastest) / sum(fastest)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
