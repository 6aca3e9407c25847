"""RMSNorm and LayerNorm in plain fp32 torch, and the FP8 rounding that may follow;
differentiable.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0
# Scales stay normal fp32 numbers: gradients divided by a million tokens are below 1e-12.
MIN_AMAX = FP8_MAX * torch.finfo(torch.float32).tiny
GROUP = 128


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """w · x / sqrt(mean(x²) + eps) over the last dimension, in fp32 or x's fp64.

    x [..., N], w [N]; the result has x's shape. Source: Zhang & Sennrich 2019, eq. 4.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w.to(wide)


def layer_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """w · (x - mean) / sqrt(var + eps) + b over the last dimension, in fp32 or x's fp64.

    x [..., N], w and b [N]; the result has x's shape. Source: Ba et al. 2016, eq. 4.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w.to(wide)
    return y if b is None else y + b.to(wide)


def to_fp8(y: torch.Tensor, quant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """y [..., N] as e4m3 and its fp32 scales, y ~ q · scale: [..., 1] for "row", [..., ceil(N /
    128)] for "1x128".
    """
    n = y.shape[-1]
    y = y.float()
    if quant == "row":
        scale = y.abs().amax(-1, keepdim=True).clamp_min(MIN_AMAX) / FP8_MAX
        return (y / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale
    padded = torch.nn.functional.pad(y, (0, -n % GROUP)).unflatten(-1, (-1, GROUP))
    scale = padded.abs().amax(-1, keepdim=True).clamp_min(MIN_AMAX) / FP8_MAX
    q = (padded / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2)[..., :n].contiguous(), scale.squeeze(-1)
