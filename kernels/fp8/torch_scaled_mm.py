"""Block-scaled products through torch's `scaled_mm` (cuBLASLt): supported devices and operand
layouts.

cuBLAS, "1D and 128x128 2D block scaling for FP8 data types": rows in multiples of 4, and the
weight's scales padded to multiples of 4 along K, else the result is silently wrong. Requires torch
2.10, CUDA 12.9, compute capability 9.0.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8.reference import E4M3, SIDE

OUTER = 16
"""scaled_mm requires the rows of both operands in multiples of this."""


@cache
def why_not(device: torch.device) -> str | None:
    """Why scaled_mm does not support block scales on this device; None if it does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"scaled_mm does not support block scales on {device.type}"
    if not hasattr(functional, "scaled_mm"):
        return "this torch has no scaled_mm; it requires torch 2.10"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if cuda < (12, 9):
        return f"CUDA {torch.version.cuda} has no block scales; they require 12.9"
    capability = torch.cuda.get_device_capability(device)
    return (
        None
        if capability == (9, 0)
        else f"cuBLAS supports block scales on 9.0, not {capability[0]}.{capability[1]}"
    )


def operands(
    a_MK: Tensor, sa: Tensor, b_NK: Tensor, sb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of scaled_mm: numbers padded by zeros, a's scales `[M, K/128]` with strides (1, M),
    b's transposed, `[K/128 up to 4, N/128]` with strides (1, rows).
    """
    (m, k), n = a_MK.shape, b_NK.shape[0]
    a, b = (_padded(x, (0, -k % SIDE, 0, -rows % OUTER)) for x, rows in ((a_MK, m), (b_NK, n)))
    a_scales = functional.pad(sa, (0, 0, 0, -m % OUTER)).t().contiguous().t()
    b_scales = functional.pad(sb, (0, -sb.shape[1] % 4)).contiguous().t()
    return a, a_scales, b.t(), b_scales


def fp8_matmul(
    a_MK: Tensor, sa: Tensor, b_NK: Tensor, sb: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """a·bᵀ `[M, N]`."""
    kinds = functional.ScalingType
    a, a_scales, b, b_scales = operands(a_MK, sa, b_NK, sb)
    out = functional.scaled_mm(
        a,
        b,
        a_scales,
        kinds.BlockWise1x128,
        b_scales,
        kinds.BlockWise128x128,
        output_dtype=out_dtype,
    )
    return out[: a_MK.shape[0], : b_NK.shape[0]]


def _padded(x: Tensor, padding: tuple[int, int, int, int]) -> Tensor:
    if not any(padding):
        return x.contiguous()
    # e4m3 itself cannot be padded
    return functional.pad(x.contiguous().view(torch.uint8), padding).view(E4M3)
