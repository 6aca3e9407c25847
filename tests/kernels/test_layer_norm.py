"""layer_norm's reference against torch and fp64 autograd, bad arguments, and the choice on a
CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain, layer_norm
from kernels.norm import reference


def test_the_reference_matches_torch_and_its_gradient() -> None:
    x, w, b = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 7), (7,), (7,))
    )
    torch.testing.assert_close(
        reference.layer_norm(x, w, b, 1e-5), torch.nn.functional.layer_norm(x, (7,), w, b)
    )
    assert torch.autograd.gradcheck(lambda *t: reference.layer_norm(*t, 1e-5), (x, w, b))


def test_a_cpu_uses_torch_if_dtypes_are_equal() -> None:
    dispatch.clear_records()
    x, w = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(layer_norm(x, w), torch.nn.functional.layer_norm(x, (8,), w))
    mixed = layer_norm(x.bfloat16(), w)
    assert mixed.dtype == torch.bfloat16
    assert [r["backend"] for r in explain()] == ["torch", "reference"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "x must be a torch.Tensor"),
        ({"w": torch.ones(9)}, ValueError, "w has shape"),
        ({"b": torch.ones(8).int()}, TypeError, "b is int32"),
        ({"b": torch.ones(8, device="meta")}, ValueError, "b is on meta"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"x": torch.ones(2, 8), "w": torch.ones(8), "b": torch.ones(8)}
    layer_norm(**good)
    with pytest.raises(error, match=message):
        layer_norm(**{**good, **change})
