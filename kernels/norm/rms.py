"""`rms_norm`: argument checks, choice of implementation, and autograd for the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, cache_choice, cached_choice, call_key, choose
from kernels.norm import reference
from kernels.norm.rms_backward import backward
from kernels.norm.rms_forward import QUANTS, forward
from kernels.row_view import as_rows

Result = torch.Tensor | tuple[torch.Tensor, ...]


def rms_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    quant: str | None = None,
    *,
    keep: bool = False,
    backend: str | None = None,
) -> Result:
    """w · h / sqrt(mean(h²) + eps) over the last dimension, with h = x or x + residual.

    Shapes: x and residual [..., N], w [N]; the result has x's dtype, sums are fp32. Returns y; with
    a residual (y, h); with quant (q, scale) or (q, scale, h): q is e4m3, y ~ q · scale, scale fp32
    [..., 1] for "row" or [..., ceil(N / 128)] for "1x128". Quantized output has no gradient. With
    `keep` the differentiable y comes first, (y, q, scale) or (y, q, scale, h), and q is computed
    from y rounded to x's dtype. Raises TypeError or ValueError before any launch. Source: Zhang &
    Sennrich 2019, eq. 4.
    """
    key = call_key("rms_norm", (x, w, residual), eps, quant, keep) if backend is None else None
    chosen = cached_choice(key)
    if chosen is None:
        chosen = _choose(x, w, eps, residual, quant, keep, backend)
        cache_choice(key, chosen)
    if chosen == "torch" and residual is None and quant is None:
        return torch.nn.functional.rms_norm(x, w.shape, w, eps)
    if chosen != "own":
        return _without_kernel(chosen, x, w, eps, residual, quant, keep)
    rows = as_rows(x)
    other = None if residual is None else as_rows(residual)
    if checks.needs_grad(x, w, residual):
        results = _RmsNorm.apply(rows, other, w, eps, quant)
    else:
        result = forward(rows, w, eps, other, quant, False, keep or not quant)
        results = (result.y, result.q, result.scale, None if residual is None else result.summed)
    outputs = tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in results if y is not None)
    return outputs[0] if len(outputs) == 1 else outputs


def _choose(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    quant: str | None,
    keep: bool,
    backend: str | None,
) -> str:
    """Checks the arguments; returns the backend."""
    needs_grad = _check(x, w, eps, residual, quant, keep)
    return choose(
        "rms_norm",
        {
            "dtype": x.dtype,
            "n": tuning.round_up(x.shape[-1]),
            "residual": residual is not None,
            "quant": quant,
            "grad": needs_grad,
        },
        [
            Candidate("own", runtime.why_not(x, w, residual) or _own_why_not(x, w, quant)),
            Candidate("torch", "torch's has no FP8 output" if quant else _torch_why_not(x, w)),
            Candidate("reference"),
        ],
        backend,
    ).backend


def _without_kernel(
    backend: str,
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    quant: str | None,
    keep: bool,
) -> Result:
    """By torch's operator or the reference."""
    h = x if residual is None else x + residual
    if quant and not keep:
        with torch.no_grad():
            q, scale = reference.to_fp8(reference.rms_norm(h, w, eps), quant)
        return (q, scale) if residual is None else (q, scale, h)
    if backend == "torch":
        y = torch.nn.functional.rms_norm(h, w.shape, w, eps)
    else:
        y = reference.rms_norm(h, w, eps).to(x.dtype)
    if quant:
        q, scale = reference.to_fp8(y.detach(), quant)
        return (y, q, scale) if residual is None else (y, q, scale, h)
    return y if residual is None else (y, h)


class _RmsNorm(torch.autograd.Function):
    """Saves h, w and 1/sqrt(mean square) per row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        w: torch.Tensor,
        eps: float,
        quant: str | None,
    ) -> tuple[torch.Tensor | None, ...]:
        results = forward(x, w, eps, residual, quant, True, True)
        ctx.save_for_backward(results.summed, w, results.rstd)
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (results.q, results.scale) if x is not None))
        return (
            results.y,
            results.q,
            results.scale,
            (results.summed if residual is not None else None),
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dy, _, _, ds = grads
        summed, w, rstd = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return ds, (ds if ctx.has_residual else None), None, None, None
        dx, dw = backward(
            as_rows(dy),
            None if ds is None else as_rows(ds),
            summed,
            w,
            rstd,
            ctx.needs_input_grad[2],
        )
        return dx, (dx if ctx.has_residual else None), dw, None, None


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    quant: str | None,
    keep: bool,
) -> bool:
    """Checks the arguments; returns whether a gradient is needed."""
    floats = (*checks.FLOATS, torch.float64)
    checks.dtype_in("x", x, floats)
    checks.dtype_in("w", w, floats)
    if x.dim() < 1:
        raise ValueError("x is a scalar; it must have a last dimension to normalize over.")
    checks.non_empty("x", x, -1)
    checks.shape("w", w, (x.shape[-1],), "(last dimension of x)")
    checks.positive("eps", eps)
    if residual is not None:
        checks.shape("residual", residual, tuple(x.shape), "(shape of x)")
        checks.same_dtype(x=x, residual=residual)
    checks.same_device(x=x, w=w, residual=residual)
    checks.one_of("quant", quant, QUANTS)
    inputs = [t for t in (x, w, residual) if t is not None]
    needs_grad = checks.needs_grad(*inputs)
    if keep and not quant:
        raise ValueError("keep requires quant; without quant the result is y already.")
    if quant and needs_grad and not keep:
        raise ValueError(
            "quant was given and an input requires a gradient; quantized output has no gradient: "
            "use "
            "no_grad(), or keep=True."
        )
    return needs_grad


def _own_why_not(x: torch.Tensor, w: torch.Tensor, quant: str | None) -> str | None:
    if quant and not runtime.has_fp8(runtime.arch(x.device)):
        return "Triton supports e4m3 from sm_89 on"
    if torch.float64 in (x.dtype, w.dtype):
        return "fp64 is not supported"
    if x.numel() == 0:
        return "x is empty"
    if not w.is_contiguous():
        return "w is not contiguous"
    return None


def _torch_why_not(x: torch.Tensor, w: torch.Tensor) -> str | None:
    return None if x.dtype == w.dtype else "torch's requires one dtype for x and w"
