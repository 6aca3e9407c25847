"""Block-scaled fp8 products on Hopper by cuBLASLt: supported devices and operand layouts.

Layouts are those that `torch.nn.functional.scaled_mm` checks and cuBLAS documents ("1D and 128x128
2D block scaling for FP8 data types"). Does not depend on layers. Needs torch 2.10, CUDA 12.9,
compute capability 9.0.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from workers.training.fp8.tiles import BLOCK, E4M3, ROW, SIDE, Tiles

# scaled_mm requires row counts of this multiple; scales of 1 x 128 tiles need multiples of 4 only
_OUTER = 16
# blocks along the contraction of a 128 x 128 operand: fewer give silently wrong results
_SCALES = 4


@cache
def usable(device: torch.device) -> bool:
    """Whether `device` supports block-scaled fp8 products; cuBLAS has them for Hopper only, not
    B200.
    """
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or not hasattr(functional, "scaled_mm")
    ):
        return False
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return cuda >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def product(left: Tiles, right: Tiles, dtype: torch.dtype) -> Tensor:
    """`left · rightᵀ` `[M, N]` of `[M, K]` in 1 x 128 tiles and `[N, K]` in 1 x 128 or 128 x 128
    tiles.
    """
    rows, columns = left.codes.shape[0], right.codes.shape[0]
    kinds = functional.ScalingType
    kind = kinds.BlockWise128x128 if right.tile == BLOCK else kinds.BlockWise1x128
    a, scale_a = operand(left)
    b, scale_b = operand(right)
    out: Tensor = functional.scaled_mm(
        a,
        b.t(),
        scale_a,
        kinds.BlockWise1x128,
        scale_b,
        kind,
        output_dtype=dtype,
        use_fast_accum=False,
    )
    return out[:rows, :columns]


def operand(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Codes `[R, K]` and scales in cuBLASLt's layout: zero padded, scales with the outer dimension
    innermost.

    Scales of 1 x 128 tiles: `[R, K/128]`, strides (1, R). Of 128 x 128 blocks: `[K/128 rounded up
    to 4, R/128]`, strides (1, rows). Raises ValueError for tiles along the other dimension.
    """
    if tiles.tile not in (ROW, BLOCK):
        raise ValueError(
            f"tiles of {tiles.tile[0]} x {tiles.tile[1]} are not along the sum. Use transposed()."
        )
    rows, columns = tiles.codes.shape
    padding = (0, -columns % SIDE, 0, -rows % _OUTER)
    # as bytes: fp8 tensors cannot be padded
    codes = functional.pad(tiles.codes.view(torch.uint8), padding).contiguous().view(E4M3)
    if tiles.tile == BLOCK:
        return codes, functional.pad(
            tiles.scales, (0, -tiles.scales.shape[1] % _SCALES)
        ).contiguous().t()
    return codes, functional.pad(tiles.scales, (0, 0, 0, -rows % _OUTER)).t().contiguous().t()
