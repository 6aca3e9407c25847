"""Block-scaled e4m3 by its definition: amax / 448 per tile, and products of the decoded numbers in
fp32.

Shapes: M, N rows of the operands, K the summed dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 128
MAX_E4M3 = 448.0
MIN_AMAX = MAX_E4M3 * torch.finfo(torch.float32).tiny
E4M3 = torch.float8_e4m3fn


def quantize(x_RK: Tensor, rows: int, columns: int = SIDE) -> tuple[Tensor, Tensor]:
    """x as e4m3 `[R, K]` and fp32 scales of tiles, `[ceil(R / rows), ceil(K / columns)]`; x ~ q ·
    scale.

    A NaN or infinity makes its whole tile NaN.
    """
    r, k = x_RK.shape
    tiled = functional.pad(x_RK.float(), (0, -k % columns, 0, -r % rows))
    tiled = tiled.view(-1, rows, tiled.shape[1] // columns, columns)
    scale = tiled.abs().amax((1, 3)).clamp_min(MIN_AMAX) / MAX_E4M3
    q = (tiled / scale[:, None, :, None]).clamp(-MAX_E4M3, MAX_E4M3).to(E4M3)
    return q.view(-1, tiled.shape[2] * columns)[:r, :k].contiguous(), scale


def dequantize(
    q_RK: Tensor, scale: Tensor, rows: int, kind: torch.dtype = torch.float32, columns: int = SIDE
) -> Tensor:
    """`[R, K]`: numbers times the scales of their tiles."""
    spread = scale.to(kind).repeat_interleave(columns, 1)[:, : q_RK.shape[1]]
    return q_RK.to(kind) * (
        spread.repeat_interleave(rows, 0)[: q_RK.shape[0]] if rows > 1 else spread
    )


def fp8_matmul(
    a_MK: Tensor, sa: Tensor, b_NK: Tensor, sb: Tensor, kind: torch.dtype = torch.float32
) -> Tensor:
    """a·bᵀ `[M, N]` in `kind`."""
    return dequantize(a_MK, sa, 1, kind) @ dequantize(b_NK, sb, SIDE, kind).T
