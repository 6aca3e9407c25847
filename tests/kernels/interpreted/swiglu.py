"""swiglu's kernels: one tensor or two, FP8 output, gradients; ragged and non-contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import swiglu
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select


def results(
    backend: str, dtype: torch.dtype, inputs: list[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    y: Any = swiglu(leaves[0], up=leaves[1] if len(leaves) > 1 else None, backend=backend)
    y.backward(grad.to(dtype))
    assert all(leaf.grad is not None for leaf in leaves)
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("rows", "width", "two", "dtype"),
    select(
        [
            (rows, width, two, dtype)
            for rows, width, two in ((3, 200, True), (2, 129, False), (5, 1, False))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        [0, 5],
    ),
)
def test_values_and_gradients(rows: int, width: int, two: bool, dtype: torch.dtype) -> None:
    inputs = [nan_padded(rows, width, dtype=dtype), nan_padded(rows, width, dtype=dtype, gap=2)]
    if not two:
        inputs = [nan_padded(rows, 2 * width, dtype=dtype)]
    grad = torch.randn(width, rows, dtype=dtype).T
    ours = results("own", dtype, inputs, grad)
    exact = results("reference", torch.float64, inputs, grad)
    assert_close(
        ["y", "dgate", "dup"][: len(ours)], ours, exact, results("torch", dtype, inputs, grad)
    )


@pytest.mark.parametrize("quant", select(["row", "1x128"], [1]))
def test_fp8_output_matches_the_reference(quant: str) -> None:
    x = nan_padded(2, 2, 600)
    ours: Any = swiglu(x, quant, backend="own")
    expected: Any = swiglu(x, quant, backend="reference")
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-5, atol=0)
    steps = (ours[0].view(torch.uint8).int() - expected[0].view(torch.uint8).int()).abs()
    normal = expected[0].float().abs() >= 2**-6  # the interpreter flushes smaller values to zero
    assert steps[normal].max() <= 1 and steps[normal].float().mean() < 0.02
