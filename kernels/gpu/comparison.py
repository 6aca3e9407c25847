"""Compares an operation's values and gradients on a GPU with its reference in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.gpu.cases import Compared, compare

FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Added to the allowed error, relative to the largest value: plain torch may be exact by chance."""


def nan_padded(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, gap: int = 3
) -> torch.Tensor:
    """Random normal values as a view into a tensor of NaN: rows have an odd stride, and reads past
    them show.
    """
    padded = torch.full(
        (*shape[:-1], shape[-1] + 2 * gap), float("nan"), dtype=dtype, device=device
    )
    view = padded[..., gap : gap + shape[-1]]
    view.copy_(torch.randn(shape, device=device))
    return view


def values_and_gradients(
    names: Sequence[str],
    call: Callable[[str, list[torch.Tensor]], Any],
    inputs: Sequence[torch.Tensor],
    plain: str = "torch",
) -> list[Compared]:
    """Compares call("own", inputs), and the gradients of a random sum of it, with call("reference",
    inputs in fp64).

    Allowed is twice the error of backend `plain` at the inputs' dtype, plus a floor. `names`: of
    the outputs, then of the inputs.
    """
    weights: list[torch.Tensor] = []

    def results(backend: str, dtype: torch.dtype | None) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        result = call(backend, leaves)
        outputs = list(result) if isinstance(result, tuple) else [result]
        if not weights:
            weights.extend(torch.randn_like(o) for o in outputs)
        torch.autograd.backward(
            outputs, [w.to(o.dtype) for o, w in zip(outputs, weights, strict=True)]
        )
        grads = [leaf.grad for leaf in leaves]
        missing = [name for name, g in zip(names[len(outputs) :], grads, strict=True) if g is None]
        if missing:
            raise AssertionError(f"no gradient for {', '.join(missing)}")
        return [*(o.detach() for o in outputs), *(g for g in grads if g is not None)]

    ours = results("own", None)
    exact, plain_values = results("reference", torch.float64), results(plain, None)
    comparisons = []
    for name, got, want, other in zip(names, ours, exact, plain_values, strict=True):
        comparisons.append(compare(name, got, want, other, floor=FLOORS.get(got.dtype, 1e-6)))
    return comparisons
