"""`moe_permute` and `moe_unpermute`: sort tokens by expert, and sum the experts' weighted outputs
per token.

Sums run over a token's assignments in order, without atomics, so results are reproducible. Shapes:
T tokens, K experts per token, A = T · K assignments, E experts, H width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import checks, runtime
from kernels.dispatch import Candidate, choose
from kernels.jit import jit, next_power_of_2, tl
from kernels.moe import reference
from kernels.operators import call_as_operator
from kernels.shipped import ShippedKernel


@dataclass(frozen=True)
class Permutation:
    """Order of the assignments: `token` [A] int32 of each sorted row, `position` [T, K] int32 of
    each assignment's row, `counts` [E] int64 rows per expert; rows after these are dropped
    assignments.
    """

    token: Tensor
    position: Tensor
    counts: Tensor


def moe_permute(
    x: Tensor, experts: Tensor, num_experts: int, *, check: bool = True, backend: str | None = None
) -> tuple[Tensor, Permutation]:
    """x `[T, H]` as rows `[A, H]` sorted by expert, in token order within an expert; and the
    permutation.

    experts `[T, K]` int, 0 to E - 1, or E for a dropped assignment. check: rejects other values,
    which synchronizes with a GPU. Raises ValueError or TypeError.
    """
    checks.dtype_in("x", x, (*checks.FLOATS, torch.float64))
    checks.dims("x", x, 2)
    checks.integer_dtype("experts", experts)
    checks.shape("experts", experts, (x.shape[0], None), "tokens of x, chosen")
    checks.non_empty("experts", experts, 1)
    checks.same_device(x=x, experts=experts)
    checks.integer("num_experts", num_experts, 1, 1 << 20)
    flat, top_k = experts.flatten(), experts.shape[1]
    if check and flat.numel():
        low, high = (int(v) for v in torch.stack(torch.aminmax(flat)).tolist())
        if low < 0 or high > num_experts:
            raise ValueError(
                f"experts contain {low if low < 0 else high}; they must be in 0 to {num_experts} "
                "(dropped)."
            )
    order = flat.argsort(stable=True)
    position = torch.empty_like(order, dtype=torch.int32)
    position[order] = torch.arange(len(flat), dtype=torch.int32, device=x.device)
    # not bincount, which synchronizes with a GPU to determine its size
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    token = (order // max(1, top_k)).int()
    permutation = Permutation(token, position.view(-1, top_k), counts[:num_experts])
    own = _use_own("moe_permute", x, top_k, backend)
    return cast(Tensor, _Permute.apply(x, permutation, own)), permutation  # type: ignore[no-untyped-call]


def moe_unpermute(
    y: Tensor,
    permutation: Permutation,
    weights: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """`[T, H]` in y's dtype: each token's rows of y `[A, H]` times its weights `[T, K]` (default
    ones), summed in fp32.

    Raises ValueError or TypeError.
    """
    if not isinstance(permutation, Permutation):
        raise TypeError(
            "permutation must be the one returned by moe_permute, not "
            f"{type(permutation).__name__}."
        )
    checks.dtype_in("y", y, (*checks.FLOATS, torch.float64))
    checks.shape("y", y, (len(permutation.token), None), "sorted rows, width")
    if weights is not None:
        checks.dtype_in("weights", weights, (*checks.FLOATS, torch.float64))
        checks.shape("weights", weights, tuple(permutation.position.shape), "tokens, chosen")
    checks.same_device(y=y, position=permutation.position, weights=weights)
    own = _use_own("moe_unpermute", y, permutation.position.shape[1], backend)
    if not own:
        return reference.unpermute(y, permutation.position, weights).to(y.dtype)
    return cast(Tensor, _Unpermute.apply(y, weights, permutation))  # type: ignore[no-untyped-call]


def _use_own(op: str, x: Tensor, top_k: int, backend: str | None) -> bool:
    facts: dict[str, object] = {
        "dtype": x.dtype,
        "width": x.shape[1],
        "top_k": top_k,
        "device": x.device.type,
    }
    double = "fp64" if x.dtype == torch.float64 else None
    own = runtime.why_not(x) or double or (None if x.numel() else "an empty operand")
    return (
        choose(op, facts, (Candidate("own", own), Candidate("reference")), backend).backend == "own"
    )


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation, own: bool) -> Tensor:
        ctx.permutation, ctx.own = permutation, own
        return x.index_select(0, permutation.token)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.own:
            return _gather(gradient.contiguous(), ctx.permutation.position, None), None, None
        return (
            reference.unpermute(gradient, ctx.permutation.position, None).to(gradient.dtype),
            None,
            None,
        )


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, permutation: Permutation) -> Tensor:
        y = y.contiguous()
        ctx.permutation = permutation
        ctx.save_for_backward(y, weights)
        return _gather(y, permutation.position, weights)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        gradient, position = gradients[0].contiguous(), ctx.permutation.position
        dy = torch.empty_like(y)
        dw = torch.empty(position.shape, dtype=torch.float32, device=y.device)
        with runtime.device_guard(y):
            moe_scatter_kernel[(position.numel(),)](
                gradient,
                y,
                None if weights is None else weights.contiguous(),
                position,
                dy,
                dw,
                y.shape[1],
                K=position.shape[1],
                WEIGHTED=weights is not None,
                BLOCK=_block(y.shape[1]),
            )
        return dy, None if weights is None else dw.to(weights.dtype), None


def _block(width: int) -> int:
    return min(32 if runtime.INTERPRET else 1024, next_power_of_2(width))


def _gather(y: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    return call_as_operator(
        "moe_unpermute", (y, position, weights), lambda: [_launch_gather(y, position, weights)]
    )[0]


def _launch_gather(y: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    (tokens, top_k), width = position.shape, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    block = _block(width)
    with runtime.device_guard(y):
        moe_gather_kernel[(tokens, -(-width // block))](
            y,
            position,
            None if weights is None else weights.contiguous(),
            out,
            width,
            K=top_k,
            WEIGHTED=weights is not None,
            BLOCK=block,
        )
    return out


@jit
def moe_gather_kernel(
    Y, PLACE, WEIGHTS, OUT, width, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """One token, BLOCK columns: its K rows, weighted."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(PLACE + token * K + k).to(tl.int64)
        y = tl.load(Y + row * width + c, mask=c < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            y = y * tl.load(WEIGHTS + token * K + k).to(tl.float32)
        acc += y
    tl.store(OUT + token * width + c, acc.to(OUT.dtype.element_ty), mask=c < width)


@jit
def moe_scatter_kernel(
    DOUT,
    Y,
    WEIGHTS,
    PLACE,
    DY,
    DW,
    width,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One assignment: the gradients of its row and of its weight."""
    assignment = tl.program_id(0).to(tl.int64)
    row = tl.load(PLACE + assignment).to(tl.int64)
    token = assignment // K
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(WEIGHTS + assignment).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        gradient = tl.load(DOUT + token * width + c, mask=c < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            total += gradient * tl.load(Y + row * width + c, mask=c < width, other=0.0).to(
                tl.float32
            )
        tl.store(DY + row * width + c, (gradient * weight).to(DY.dtype.element_ty), mask=c < width)
    if WEIGHTED:
        tl.store(DW + assignment, tl.sum(total, 0))


def shipped(arch: str) -> list[ShippedKernel]:
    """Eight experts per token of width 4096, forward and backward."""
    constants: dict[str, Any] = {"K": 8, "WEIGHTED": True, "BLOCK": 1024}
    signature = {"Y": "*bf16", "PLACE": "*i32", "WEIGHTS": "*fp32", "width": "i32:16"}
    return [
        ShippedKernel(
            "moe_unpermute", "gather", moe_gather_kernel, signature | {"OUT": "*bf16"}, constants
        ),
        ShippedKernel(
            "moe_unpermute",
            "scatter",
            moe_scatter_kernel,
            signature | {"DOUT": "*bf16", "DY": "*bf16", "DW": "*fp32"},
            constants,
        ),
    ]
