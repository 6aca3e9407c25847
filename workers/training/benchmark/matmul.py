"""Matrix products by size and precision: the speed of one device while all of them multiply.

Does not depend on models; the peak of MFU is in `workers.metrics.peak`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from workers.training.parallel.mesh import World

_CPU = (128, 256, 512, 1024), {"fp32": torch.float32, "bf16": torch.bfloat16}
_GPU = (
    (1024, 2048, 4096, 8192, 16384),
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
)
_CALLS = 5


def measure_products(world: World, *, mark_progress: Callable[[], None]) -> dict[str, Any]:
    """`{rows: [{precision, size, seconds, tflops}]}` of size³ products, the mean over ranks.

    Calls `mark_progress` at every size.
    """
    sizes, dtypes = _GPU if world.device.type == "cuda" else _CPU
    rows = []
    for precision, dtype in dtypes.items():
        for size in sizes:
            mark_progress()
            world.barrier()
            seconds = torch.tensor(
                _seconds(size, dtype, world.device), dtype=torch.float64, device=world.device
            )
            mean = float(world.sum_(seconds)) / world.size
            rows.append(
                {
                    "precision": precision,
                    "size": size,
                    "seconds": mean,
                    "tflops": 2e-12 * size**3 / mean,
                }
            )
    return {"rows": rows}


def _seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(1 + _CALLS):
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times[1:])
