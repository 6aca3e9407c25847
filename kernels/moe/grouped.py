"""`grouped_matmul`: each expert's rows times its weight, forward and backward; row counts stay on
the device.

Few rows per expert and odd sizes run in the own kernel; many rows in bf16 on Hopper run in torch's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import checks, runtime
from kernels.dispatch import Candidate, choose
from kernels.moe import reference
from kernels.moe.grouped_kernels import launch_rows, launch_weights
from kernels.operators import call_as_operator

MIN_TORCH_ROWS = 256
"""Rows per expert from which torch's grouped product comes first."""


def grouped_matmul(
    x: Tensor, w: Tensor, counts: Tensor, *, check: bool = True, backend: str | None = None
) -> Tensor:
    """`[A, N]` in x's dtype: rows of x `[A, K]`, sorted by expert, times that expert's weight in w
    `[E, N, K]`.

    counts `[E]` int64: rows of each expert; rows of x after their sum give zeros. check: rejects
    counts that exceed x, which synchronizes with a GPU. Raises ValueError or TypeError.
    """
    checks.dtype_in("x", x, (*checks.FLOATS, torch.float64))
    checks.dims("x", x, 2)
    checks.same_dtype(x=x, w=w)
    checks.shape("w", w, (None, None, x.shape[1]), "experts, outputs, inputs of x")
    checks.integer_dtype("counts", counts)
    checks.shape("counts", counts, (w.shape[0],), "experts of w")
    checks.same_device(x=x, w=w, counts=counts)
    if check and counts.numel():
        minimum, most, total = (
            int(v) for v in torch.stack([*torch.aminmax(counts), counts.sum()]).tolist()
        )
        if minimum < 0 or max(most, total) > x.shape[0]:  # a sum of large counts may overflow
            raise ValueError(
                f"counts contain {minimum} to {most} and sum to {total}; x has {x.shape[0]} rows."
            )
    facts: dict[str, object] = {
        "experts": w.shape[0],
        "n": w.shape[1],
        "k": w.shape[2],
        "dtype": x.dtype,
        "device": x.device.type,
    }
    empty = None if x.numel() and w.numel() else "an empty operand"
    double = "fp64" if x.dtype == torch.float64 else None
    own = Candidate("own", runtime.why_not(x) or empty or double)
    torch_candidate = Candidate("torch", _torch_why_not(x, w) or empty)
    order = (
        (torch_candidate, own)
        if x.shape[0] >= MIN_TORCH_ROWS * w.shape[0]
        else (own, torch_candidate)
    )
    chosen = choose("grouped_matmul", facts, (*order, Candidate("reference")), backend).backend
    if chosen == "reference":
        return reference.grouped_matmul(x, w, counts)
    return cast(Tensor, _Grouped.apply(x, w, counts, chosen == "own"))  # type: ignore[no-untyped-call]


def _torch_why_not(x: Tensor, w: Tensor) -> str | None:
    if not x.is_cuda or not hasattr(torch, "_grouped_mm"):
        return "torch's grouped product runs on GPUs only"
    if x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "torch's grouped product is fast for bf16 on compute capability 9.0 only"
    if w.shape[1] % 8 or w.shape[2] % 8:
        return "torch's grouped product requires sizes in multiples of 8"
    return None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, counts: Tensor, own: bool) -> Tensor:
        # ends of the experts' rows, and of x: the remaining rows belong to no expert
        ends = torch.cat(
            [counts.new_zeros(1), counts.cumsum(0), counts.new_full((1,), x.shape[0])]
        ).int()
        ctx.save_for_backward(x, w, ends)
        ctx.own = own
        return _rows(x, w, ends, own)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        dx = _rows(gradient, w.transpose(1, 2), ends, ctx.own) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            if ctx.own:
                dw = launch_weights(gradient, x, ends)
            else:
                dw = torch._grouped_mm(gradient.t(), x.contiguous(), offs=ends[1:-1])
        return dx, dw, None, None


def _rows(x: Tensor, w_ENK: Tensor, ends: Tensor, own: bool) -> Tensor:
    if own:
        flops = 2 * x.shape[0] * w_ENK.shape[1] * w_ENK.shape[2]
        return call_as_operator(
            "grouped_matmul", (x, w_ENK, ends), lambda: [launch_rows(x, w_ENK, ends)], flops=flops
        )[0]
    out = torch._grouped_mm(x.contiguous(), w_ENK.transpose(1, 2), offs=ends[1:-1])
    # rows without an expert were not written
    unowned = torch.arange(x.shape[0], device=x.device) >= ends[-2]
    return out.masked_fill_(unowned.unsqueeze(1), 0.0)
