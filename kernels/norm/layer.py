"""`layer_norm`: argument checks, choice of implementation, and autograd for the Triton kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, cache_choice, cached_choice, call_key, choose
from kernels.norm import reference
from kernels.norm.layer_backward import backward
from kernels.norm.layer_forward import forward
from kernels.row_view import as_rows


def layer_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """w · (x - mean) / sqrt(var + eps) + b over the last dimension.

    Shapes: x [..., N], w and b [N]; the result has x's shape and dtype, sums are fp32. Raises
    TypeError or ValueError before any launch. Source: Ba et al. 2016, eq. 4.
    """
    key = call_key("layer_norm", (x, w, b), eps) if backend is None else None
    chosen = cached_choice(key)
    if chosen is None:
        chosen = _choose(x, w, b, eps, backend)
        cache_choice(key, chosen)
    if chosen == "torch":
        return torch.nn.functional.layer_norm(x, w.shape, w, b, eps)
    if chosen == "reference":
        return reference.layer_norm(x, w, b, eps).to(x.dtype)
    rows = as_rows(x)
    y = (
        cast(torch.Tensor, _LayerNorm.apply(rows, w, b, eps))
        if checks.needs_grad(x, w, b)
        else forward(rows, w, b, eps, False)[0]
    )
    return y.view(x.shape)


def _choose(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, backend: str | None
) -> str:
    """Checks the arguments; returns the backend."""
    floats = (*checks.FLOATS, torch.float64)
    checks.dtype_in("x", x, floats)
    if x.dim() < 1:
        raise ValueError("x is a scalar; it must have a last dimension to normalize over.")
    checks.non_empty("x", x, -1)
    params = {"w": w} if b is None else {"w": w, "b": b}
    for name, t in params.items():
        checks.dtype_in(name, t, floats)
        checks.shape(name, t, (x.shape[-1],), "(last dimension of x)")
    checks.positive("eps", eps)
    checks.same_device(x=x, **params)
    mixed = any(t.dtype != x.dtype for t in params.values())
    return choose(
        "layer_norm",
        {
            "dtype": x.dtype,
            "n": tuning.round_up(x.shape[-1]),
            "bias": b is not None,
            "grad": checks.needs_grad(x, w, b),
        },
        [
            Candidate("own", runtime.why_not(x, w, b) or _own_why_not(x, params)),
            Candidate("torch", "torch's requires one dtype for x, w and b" if mixed else None),
            Candidate("reference"),
        ],
        backend,
    ).backend


class _LayerNorm(torch.autograd.Function):
    """Saves x, w, b, and mean and 1/sqrt(var) per row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        y, mean, rstd = forward(x, w, b, eps, True)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, b, mean, rstd = ctx.saved_tensors
        need_dw, need_db = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        dx, dw, db = backward(as_rows(grads[0]), x, w, mean, rstd, need_dw, b if need_db else None)
        return dx, dw, db, None


def _own_why_not(x: torch.Tensor, params: dict[str, torch.Tensor]) -> str | None:
    if torch.float64 in (x.dtype, *(t.dtype for t in params.values())):
        return "fp64 is not supported"
    if x.numel() == 0:
        return "x is empty"
    return next(
        (f"{name} is not contiguous" for name, t in params.items() if not t.is_contiguous()), None
    )
