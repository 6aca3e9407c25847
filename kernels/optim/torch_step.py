"""An AdamW step without own kernels: torch's fused one where it does the same, else the reference.

Knows no optimizer. Both give (norm or None, skipped), fp32 of one element.
"""

from __future__ import annotations

import torch

from kernels.optim import reference
from kernels.optim.step_options import Asked, Item

Result = tuple[torch.Tensor | None, torch.Tensor]


def not_torch(work: list[Item], asked: Asked) -> str | None:
    """Why torch's fused step cannot do this; None when it can."""
    if asked.clip_norm is not None or any(
        t is not None for t in (asked.inv_scale, asked.grad_norm, asked.found_inf)
    ):
        return "torch's writes scaled gradients back"
    if any(item.param.dtype != torch.float32 or item.grad.dtype != torch.float32 for item in work):
        return "torch's wants moments of the parameters' dtype"
    return None


def by_torch(work: list[Item], asked: Asked) -> Result:
    """torch's fused AdamW, one call for each set of options."""
    by_options: dict[tuple[object, ...], list[Item]] = {}
    for item in work:
        by_options.setdefault((item.lr, item.betas, item.eps, item.weight_decay), []).append(item)
    for items in by_options.values():
        params, grads, means, squares, steps = (
            list(t) for t in zip(*(item.row for item in items), strict=True)
        )
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            lr=items[0].lr,
            beta1=items[0].betas[0],
            beta2=items[0].betas[1],
            weight_decay=items[0].weight_decay,
            eps=items[0].eps,
            amsgrad=False,
            maximize=False,
        )
    return None, torch.zeros(1, device=work[0].param.device)


def by_reference(work: list[Item], asked: Asked) -> Result:
    """The reference, parameter by parameter; waits for the device to see if it must skip."""
    device = work[0].param.device
    found = (
        torch.zeros(1, device=device)
        if asked.found_inf is None
        else asked.found_inf.clone().view(1)
    )
    norm = None if asked.grad_norm is None else asked.grad_norm.detach().view(1)
    if asked.measured:
        squares, overflow = reference.measure([item.grad for item in work], asked.inv_scale)
        norm, found = squares.sqrt(), found + overflow
    skipped = (found > 0).float()
    if bool(skipped):
        return norm, skipped
    scale = torch.ones(1, device=device) if asked.inv_scale is None else asked.inv_scale.view(1)
    if asked.clip_norm is not None and norm is not None:
        scale = scale * (asked.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for item in work:
        param, grad, mean, square, step = item.row
        step += 1
        options = {"lr": item.lr, "eps": item.eps, "weight_decay": item.weight_decay}
        new = reference.step(
            param, grad.float() * scale, mean, square, int(step), betas=item.betas, **options
        )
        by_chance = asked.stochastic and param.dtype == torch.bfloat16
        param.copy_(reference.round_stochastically(new) if by_chance else new)
    return norm, skipped
