"""Autograd for the own attention kernels, dense and ragged.

Imports `launch`, which loads triton, at the first call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import runtime
from kernels.attention.spec import AttentionSpec, Bounds
from kernels.operators import call_as_operator

MAX_HEAD_DIM = 256


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why the own kernels cannot run this call; None if they can."""
    reason = runtime.why_not(q)
    if reason is not None:
        return reason
    if q.dtype is torch.float64:
        return "float64 does not use tensor cores"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"head dims above {MAX_HEAD_DIM}"
    return None


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v], log-sum-exp [B, H, Q]); both have gradients."""
    out, lse = _TritonAttention.apply(q, k, v, bounds, spec)
    return out, lse


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        from kernels.attention.triton_kernels import launch

        ends = (bounds.cu_q, bounds.cu_k) if bounds else ()
        # every score counts, as for torch's kernels
        pairs = q[..., 0].numel() * (bounds.max_k if bounds else k.shape[1])
        flops = 2 * pairs * (q.shape[-1] + v.shape[-1])
        run = partial(launch.forward, q, k, v, bounds, spec)
        out, lse = call_as_operator("attention", (q, k, v, *ends), run, flops=flops)
        ctx.save_for_backward(q, k, v, out, lse, *ends)
        ctx.longest = (bounds.max_q, bounds.max_k) if bounds else None
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return None, None, None, None, None
        from kernels.attention.triton_kernels import launch

        q, k, v, out, lse, *ends = ctx.saved_tensors
        bounds = Bounds(ends[0], ends[1], *ctx.longest) if ends else None
        needs_grad = ctx.needs_input_grad[:3]
        return (
            *launch.backward(q, k, v, out, lse, grad, grad_lse, bounds, ctx.spec, needs_grad),
            None,
            None,
        )
