"""An AdamW step without own kernels: torch's fused one if it is equivalent, else the reference.

Both return (norm or None, skipped), fp32 of one element.
"""

from __future__ import annotations

import torch

from kernels.optim import reference
from kernels.optim.step_options import ParameterUpdate, StepOptions

Result = tuple[torch.Tensor | None, torch.Tensor]


def torch_why_not(work: list[ParameterUpdate], options: StepOptions) -> str | None:
    """Why torch's fused step is not equivalent; None if it is."""
    if options.clip_norm is not None or any(
        t is not None for t in (options.inv_scale, options.grad_norm, options.found_inf)
    ):
        return "torch's writes scaled gradients back"
    if any(item.param.dtype != torch.float32 or item.grad.dtype != torch.float32 for item in work):
        return "torch's requires moments of the parameters' dtype"
    return None


def step_by_torch(work: list[ParameterUpdate], options: StepOptions) -> Result:
    """torch's fused AdamW, one call for each set of options."""
    by_options: dict[tuple[object, ...], list[ParameterUpdate]] = {}
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


def step_by_reference(work: list[ParameterUpdate], options: StepOptions) -> Result:
    """The reference, parameter by parameter; synchronizes with the device to decide whether to
    skip.
    """
    device = work[0].param.device
    found_inf = (
        torch.zeros(1, device=device)
        if options.found_inf is None
        else options.found_inf.clone().view(1)
    )
    norm = None if options.grad_norm is None else options.grad_norm.detach().view(1)
    if options.measured:
        squares, overflow = reference.measure([item.grad for item in work], options.inv_scale)
        norm, found_inf = squares.sqrt(), found_inf + overflow
    skipped = (found_inf > 0).float()
    if bool(skipped):
        return norm, skipped
    scale = torch.ones(1, device=device) if options.inv_scale is None else options.inv_scale.view(1)
    if options.clip_norm is not None and norm is not None:
        scale = scale * (options.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for index, item in enumerate(work):
        param, grad, mean, square, step = item.row
        step += 1
        rates = {"lr": item.lr, "eps": item.eps, "weight_decay": item.weight_decay}
        new = reference.step(
            param, grad.float() * scale, mean, square, int(step), betas=item.betas, **rates
        )
        stochastic = options.stochastic and param.dtype == torch.bfloat16
        if stochastic:
            # as in the kernel, random numbers depend on seed, step and place only
            generator = torch.Generator(device).manual_seed(
                hash((options.seed, int(step), index)) & (1 << 63) - 1
            )
            new = reference.round_stochastically(new, generator)
        param.copy_(new)
    return norm, skipped
