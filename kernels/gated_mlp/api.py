"""`swiglu`: argument checks, choice of implementation, and autograd for the Triton kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, cache_choice, cached_choice, call_key, choose
from kernels.gated_mlp import reference
from kernels.gated_mlp.triton_swiglu import backward, forward
from kernels.norm.reference import to_fp8
from kernels.row_view import as_rows


def swiglu(
    gate_up: torch.Tensor,
    quant: str | None = None,
    *,
    up: torch.Tensor | None = None,
    keep: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """silu(gate) · up.

    gate_up [..., 2F] contains gate in its first half and up in its second; if `up` [..., F] is
    given, gate_up is the gate alone. Returns y [..., F] in its dtype, or with quant (q, scale):
    e4m3, y ~ q · scale, scale fp32 [..., 1] for "row" or [..., ceil(F / 128)] for "1x128".
    Quantized output has no gradient. With `keep`, for "1x128" only, returns (y, q, scale): y is
    differentiable, and q is computed from y rounded to its dtype. Raises TypeError or ValueError
    before any launch. Source: Shazeer 2020, eq. 6.
    """
    key = call_key("swiglu", (gate_up, up), quant, keep) if backend is None else None
    chosen = cached_choice(key)
    if chosen is None:
        chosen = _choose(gate_up, up, quant, keep, backend)
        cache_choice(key, chosen)
    if chosen != "own":
        gate, other = gate_up.chunk(2, -1) if up is None else (gate_up, up)
        if quant and not keep:
            with torch.no_grad():
                return to_fp8(reference.swiglu(gate, other), quant)
        if chosen == "torch":
            return torch.nn.functional.silu(gate) * other
        y = reference.swiglu(gate, other).to(gate.dtype)
        return (y, *to_fp8(y.detach(), "1x128")) if keep else y
    rows, other_rows = as_rows(gate_up), None if up is None else as_rows(up)
    if checks.needs_grad(gate_up, up):
        results = cast(list[torch.Tensor], _SwiGlu.apply(rows, other_rows, quant))
    else:
        results = forward(*_halves(rows, other_rows), quant, keep or not quant)
    outputs = tuple(x.view(*gate_up.shape[:-1], x.shape[-1]) for x in results)
    return outputs if quant else outputs[0]


def _choose(
    gate_up: torch.Tensor,
    up: torch.Tensor | None,
    quant: str | None,
    keep: bool,
    backend: str | None,
) -> str:
    """Checks the arguments; returns the backend."""
    needs_grad = _check(gate_up, up, quant, keep)
    width = gate_up.shape[-1] if up is not None else gate_up.shape[-1] // 2
    own = runtime.why_not(gate_up, up)
    if own is None and gate_up.dtype == torch.float64:
        own = "fp64 is not supported"
    if own is None and quant and not runtime.has_fp8(runtime.arch(gate_up.device)):
        own = "Triton supports e4m3 from sm_89 on"
    if own is None and gate_up.numel() == 0:
        own = "gate_up is empty"
    return choose(
        "swiglu",
        {"dtype": gate_up.dtype, "n": tuning.round_up(width), "quant": quant, "grad": needs_grad},
        [
            Candidate("own", own),
            Candidate("torch", "torch's has no FP8 output" if quant else None),
            Candidate("reference"),
        ],
        backend,
    ).backend


class _SwiGlu(torch.autograd.Function):
    """Saves its inputs only; the sigmoid is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, up: torch.Tensor | None, quant: str | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(gate_up, up)
        results = forward(*_halves(gate_up, up), quant, True)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_up, up = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        dup = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
        backward(as_rows(grads[0]), *_halves(gate_up, up), *_halves(dgate_up, dup))
        return dgate_up, dup, None


def _halves(gate_up: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if up is not None:
        return gate_up, up
    width = gate_up.shape[1] // 2
    return gate_up[:, :width], gate_up[:, width:]


def _check(gate_up: torch.Tensor, up: torch.Tensor | None, quant: str | None, keep: bool) -> bool:
    """Checks the arguments; returns whether a gradient is needed."""
    checks.dtype_in("gate_up", gate_up, (*checks.FLOATS, torch.float64))
    if gate_up.dim() < 1:
        raise ValueError("gate_up is a scalar; it must have a last dimension.")
    checks.non_empty("gate_up", gate_up, -1)
    if up is None:
        if gate_up.shape[-1] % 2:
            raise ValueError(
                f"gate_up has {gate_up.shape[-1]} columns, an odd number; it must contain gate and "
                "up of equal width. "
                "If they are two tensors, pass the gate and up=."
            )
    else:
        checks.shape("up", up, tuple(gate_up.shape), "(shape of gate_up, the gate)")
        checks.same_dtype(gate_up=gate_up, up=up)
        checks.same_device(gate_up=gate_up, up=up)
    checks.one_of("quant", quant, (None, "row", "1x128"))
    needs_grad = checks.needs_grad(gate_up, up)
    if keep and quant != "1x128":
        raise ValueError(
            f'keep was given with quant {quant!r}; only "1x128" returns y with the codes.'
        )
    if quant and needs_grad and not keep:
        raise ValueError(
            "quant was given and an input requires a gradient; quantized output has no gradient: "
            "use "
            "no_grad(), or keep=True."
        )
    return needs_grad
