"""layer_norm's kernels: narrow and wide rows, with and without bias, values and gradients."""

from __future__ import annotations

import pytest
import torch

from kernels import layer_norm
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select


def results(
    backend: str, dtype: torch.dtype, inputs: list[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    y = layer_norm(*leaves, backend=backend)
    y.backward(grad.to(dtype))
    assert all(leaf.grad is not None for leaf in leaves)
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("rows", "n", "bias", "dtype"),
    select(
        [
            (rows, n, bias, dtype)
            for rows, n, bias in ((5, 48, True), (3, 257, False), (4, 700, True))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        [0, 5],  # narrow rows in fp32, wide ragged rows in bf16
    ),
)
def test_values_and_gradients(rows: int, n: int, bias: bool, dtype: torch.dtype) -> None:
    # a nonzero mean, to test cancellation
    inputs = [nan_padded(rows, n, dtype=dtype) * 0.5 + 3, *torch.randn(1 + bias, n, dtype=dtype)]
    grad = torch.randn(rows, n, dtype=dtype)
    ours = results("own", dtype, inputs, grad)
    exact = results("reference", torch.float64, inputs, grad)
    assert_close(
        ["y", "dx", "dw", "db"][: 3 + bias], ours, exact, results("torch", dtype, inputs, grad)
    )


def test_gradient_of_the_bias_only() -> None:
    x, w, b = torch.randn(2, 3, 20), torch.randn(20), torch.randn(20, requires_grad=True)
    layer_norm(x, w, b, backend="own").sum().backward()
    torch.testing.assert_close(b.grad, torch.full((20,), 6.0))
