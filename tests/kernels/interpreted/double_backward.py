"""Second derivatives of own kernels are refused; none is silently a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import apply_rope, layer_norm, rms_norm, swiglu


def _rope(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(8.0).view(4, 2)
    heads = x.view(1, 4, 1, 4)
    q, _ = apply_rope(heads, heads, angles.cos(), angles.sin(), backend="own")
    return q


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones(4), backend="own"),
    "layer_norm": lambda x: layer_norm(x, torch.ones(4), torch.zeros(4), backend="own"),
    "swiglu": lambda x: swiglu(x, backend="own"),
    "apply_rope": _rope,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_derivative_is_refused(name: str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    (first,) = torch.autograd.grad(OPERATIONS[name](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
