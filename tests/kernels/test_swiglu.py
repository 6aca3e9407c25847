"""swiglu's reference against torch and fp64 autograd, bad arguments, and the choice on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain, swiglu
from kernels.gated_mlp import reference


def test_the_reference_has_the_gradient_of_the_formula() -> None:
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    torch.testing.assert_close(reference.swiglu(gate, up), gate / (1 + (-gate).exp()) * up)
    assert torch.autograd.gradcheck(reference.swiglu, (gate, up))


def test_one_tensor_or_two_on_a_cpu() -> None:
    dispatch.clear_records()
    gate, up = torch.randn(2, 3, 10)
    one: Any = swiglu(torch.cat((gate, up), -1))
    two: Any = swiglu(gate, up=up)
    torch.testing.assert_close(one, two)
    assert explain()[0]["backend"] == "torch" and explain()[0]["calls"] == 2
    q, scale = swiglu(gate, "1x128", up=up)
    assert ((q.float() * scale - two).abs() <= two.abs() / 16 + scale * 2**-9).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate_up": torch.ones(2, 7)}, ValueError, "odd number"),
        ({"gate_up": torch.ones(2, 8).long()}, TypeError, "gate_up is int64"),
        ({"up": torch.ones(2, 4)}, ValueError, "up has shape"),
        ({"up": torch.ones(2, 8).double()}, TypeError, "Cast one"),
        ({"quant": "int8"}, ValueError, "quant is 'int8'"),
        ({"gate_up": torch.ones(2, 8, requires_grad=True), "quant": "row"}, ValueError, "no_grad"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"gate_up": torch.ones(2, 8)}
    swiglu(**good)
    with pytest.raises(error, match=message):
        swiglu(**{**good, **change})
