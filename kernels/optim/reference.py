"""Unscaling, the norm over many tensors and AdamW's rule in plain torch: the reference for the
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unscale_(
    grads: Sequence[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor
) -> None:
    """Multiplies gradients in place; sets found_inf to 1 if one contains an infinity or NaN."""
    for grad in grads:
        if grad.numel():
            found_inf.masked_fill_(~grad.isfinite().all(), 1.0)
            grad.copy_(
                grad.float() * inv_scale if grad.dtype != torch.float64 else grad * inv_scale
            )


def measure(
    grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of squares of the unscaled gradients, 1 if one is not finite): fp32, [1] each."""
    device = grads[0].device
    squares, overflow = torch.zeros(1, device=device), torch.zeros(1, device=device)
    for grad in grads:
        g = grad.float() if inv_scale is None else grad.float() * inv_scale
        squares += g.square().sum()
        overflow.masked_fill_(~grad.isfinite().all(), 1.0)
    return squares, overflow


def step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    steps: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.Tensor:
    """The new parameter in fp32 (or its fp64); updates the moments in place.

    Decoupled weight decay (Loshchilov & Hutter 2019, alg. 2); `steps` includes this one.
    """
    wide = torch.promote_types(param.dtype, torch.float32)
    g = grad.to(wide)
    exp_avg.lerp_(g, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    divisor = exp_avg_sq.sqrt().div_((1 - betas[1] ** steps) ** 0.5).add_(eps)
    return (
        param.to(wide)
        .mul(1 - lr * weight_decay)
        .addcdiv_(exp_avg, divisor, value=-lr / (1 - betas[0] ** steps))
    )


def round_stochastically(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 x as bf16, up or down with probabilities that preserve its expectation.

    Source: Gupta et al. 2015, eq. 2.
    """
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()
