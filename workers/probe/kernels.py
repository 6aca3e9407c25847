"""Rates of one device at the shapes of models: products, attention, copies, host time per call.

Each is the best of several repetitions, after a warm-up. Does not depend on processes or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workers.probe.measure import best_s, memory_bytes_per_s

# tokens, input width, output width: squares for the peak, then a block's products
_CPU_PRODUCTS = ((512, 512, 512), (512, 128, 344), (512, 288, 768), (512, 1024, 2816))
_GPU_PRODUCTS = ((8192, 8192, 8192), (4096, 1024, 4096), (4096, 4096, 14336), (16384, 8192, 28672))
# batch, heads, positions, head width
_CPU_ATTENTION = ((4, 4, 128, 32), (1, 8, 512, 64))
_GPU_ATTENTION = ((4, 32, 2048, 128), (1, 32, 8192, 128))
_HOST_CALLS = 200


def rates(device: torch.device, *, short: bool) -> Iterator[dict[str, Any]]:
    """`{measure, setting, value, seconds?}` one by one; `short` leaves out the larger shapes."""
    gpu = device.type == "cuda"
    products = _GPU_PRODUCTS if gpu else _CPU_PRODUCTS
    for precision, dtype in _precisions(gpu, short=short):
        for shape in products[:2] if short else products:
            yield _product(device, shape, precision, dtype)
    for sizes in (_GPU_ATTENTION if gpu else _CPU_ATTENTION)[: 1 if short else 2]:
        yield _attention(device, sizes, torch.bfloat16 if gpu else torch.float32)
    size = 2**30 if gpu else 2**26
    yield {
        "measure": "memory",
        "setting": f"copy of {size >> 20} MiB",
        "value": memory_bytes_per_s(device, size=size),
    }
    yield _host(device)


def _precisions(gpu: bool, *, short: bool) -> list[tuple[str, torch.dtype]]:
    if gpu:
        return [("bf16", torch.bfloat16)]
    # bf16 products of a CPU without bf16 units take seconds
    return [("fp32", torch.float32), *([] if short else [("bf16", torch.bfloat16)])]


def _product(
    device: torch.device, shape: tuple[int, int, int], precision: str, dtype: torch.dtype
) -> dict[str, Any]:
    tokens, inner, outer = shape
    left = torch.randn(tokens, inner, device=device).to(dtype)
    right = torch.randn(inner, outer, device=device).to(dtype)
    out = torch.empty(tokens, outer, device=device, dtype=dtype)
    seconds = best_s(lambda: torch.mm(left, right, out=out), device, calls=3)
    flops = 2.0 * tokens * inner * outer
    setting = f"{tokens} x {inner} x {outer} {precision}"
    return {"measure": "matmul", "setting": setting, "value": flops / seconds, "seconds": seconds}


def _attention(
    device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> dict[str, Any]:
    """Forward and backward of a causal attention; 2 and 5 products (arXiv 2205.14135), halved."""
    batch, heads, positions, width = shape
    q, k, v = (
        torch.randn(batch, heads, positions, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )

    def both() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out.sum(), (q, k, v))

    seconds = best_s(both, device, calls=2)
    flops = 7 * 2.0 * batch * heads * positions * positions * width / 2
    setting = f"batch {batch}, {heads} heads of {width}, {positions} positions"
    return {
        "measure": "attention",
        "setting": setting,
        "value": flops / seconds,
        "seconds": seconds,
    }


def _host(device: torch.device) -> dict[str, Any]:
    """Seconds that one small operation with a gradient costs the host."""
    weight = torch.ones(16, device=device, requires_grad=True)

    def calls() -> None:
        value = weight
        for _ in range(_HOST_CALLS):
            value = value * 1.0
        torch.autograd.grad(value.sum(), weight)

    seconds = best_s(calls, device, calls=1) / (2 * _HOST_CALLS)  # forward and backward
    setting = "element-wise operation with its gradient"
    return {"measure": "host", "setting": setting, "value": seconds}
