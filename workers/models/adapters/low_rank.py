"""W x + scale · B A x as one autograd function: the update is added in place by each product.

Separate operators store the update and its scaled copy next to W x, three passes over the outputs
forward and as many backward. Shapes: T tokens, K inputs, N outputs, R rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.adapters.nf4 import Nf4


def applies(x: Tensor, weight: Tensor | Nf4, a_RK: Tensor, b_NR: Tensor) -> bool:
    """Whether `low_rank_linear` computes these: plain tensors of one type, W frozen.

    Not where a dispatch mode sees each operator: selective recomputation saves outputs of
    products, which must not change in place.
    """
    tensors = [x, a_RK, b_NR]
    if isinstance(weight, Tensor):
        if weight.requires_grad:
            return False
        tensors.append(weight)
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors)
        and same_type(*tensors)
        and not torch.is_autocast_enabled(x.device.type)
    )


def same_type(*tensors: Tensor) -> bool:
    """Whether none is sharded and all have one element type."""
    unsharded = not any(hasattr(each, "to_local") for each in tensors)
    return unsharded and len({each.dtype for each in tensors}) == 1


def add_update(out: Tensor, inner: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    """`out` + scale · B `inner` by one operator, which selective recomputation saves in place of
    `out`.
    """
    out_TN, inner_TR = out.reshape(-1, out.shape[-1]), inner.reshape(-1, inner.shape[-1])
    return torch.addmm(out_TN, inner_TR, b_NR.t(), alpha=scale).view_as(out)


def low_rank_linear(
    x: Tensor, weight: Tensor | Nf4, a_RK: Tensor, b_NR: Tensor, scale: float
) -> Tensor:
    """`[..., K]` → `[..., N]`: W x + scale · B A x (arXiv 2106.09685, eq. 3) with W frozen.

    Saves x and A x for the backward pass, like the separate operators. `weight`: `[N, K]`, or its
    4-bit form, which is dequantized in each pass.
    """
    out = _LowRankLinear.apply(x, weight, a_RK, b_NR, scale)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | Nf4, a_RK: Tensor, b_NR: Tensor, scale: float
    ) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        inner_TR = functional.linear(x_TK, a_RK)
        out_TN = functional.linear(x_TK, _dense(weight, x.dtype))
        out_TN.addmm_(inner_TR, b_NR.t(), alpha=scale)
        ctx.weight, ctx.scale = weight, scale
        ctx.save_for_backward(x, inner_TR, a_RK, b_NR)
        return out_TN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inner_TR, a_RK, b_NR = ctx.saved_tensors
        grad_TN = gradients[0].reshape(-1, gradients[0].shape[-1])
        scaled_TR = (grad_TN @ b_NR).mul_(ctx.scale)
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx_TK = grad_TN @ _dense(ctx.weight, x.dtype)
            dx = dx_TK.addmm_(scaled_TR, a_RK).view_as(x)
        if ctx.needs_input_grad[2]:
            da = scaled_TR.t() @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[3]:
            db = (grad_TN.t() @ inner_TR).mul_(ctx.scale)
        return dx, None, da, db, None


def _dense(weight: Tensor | Nf4, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(dtype)
