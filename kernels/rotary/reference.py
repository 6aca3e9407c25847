"""Rotary position embedding in plain fp32 torch: the reference for the kernels; differentiable."""

from __future__ import annotations

import torch


def rotate(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    interleaved: bool,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotates the first 2R dims of each head by its token's angles (RoFormer, arXiv 2104.09864, eq.
    34).

    x [T, H, D]; cos, sin [T, R]; pairs are (i, i + R), or (2i, 2i + 1) if interleaved. In fp32, or
    x's fp64.
    """
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    rotated, rest = x_THD.to(wide).split(
        (2 * cos_TR.shape[1], x_THD.shape[2] - 2 * cos_TR.shape[1]), -1
    )
    cos, sin = cos_TR.to(wide)[:, None, :], sin_TR.to(wide)[:, None, :]
    sin = -sin if inverse else sin
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(
            -2
        )
    else:
        first, second = rotated.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((rotated, rest), -1)
