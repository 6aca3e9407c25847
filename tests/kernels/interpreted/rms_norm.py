"""rms_norm's kernels: narrow and wide rows, residual, FP8, gradients; ragged, non-contiguous,
empty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import explain, rms_norm
from kernels.norm import reference
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select

EPS = 1e-5


def results(
    backend: str, dtype: torch.dtype, inputs: list[torch.Tensor], grads: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    x, w, *residual = leaves
    y: Any = rms_norm(x, w, EPS, *residual, backend=backend)
    outputs = list(y) if residual else [y]
    torch.autograd.backward(outputs, [g.to(dtype) for g in grads[: len(outputs)]])
    assert all(leaf.grad is not None for leaf in leaves)
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("rows", "n", "residual", "dtype"),
    select(
        [
            (rows, n, residual, dtype)
            for rows, n, residual in ((5, 48, True), (3, 257, False), (4, 700, True), (9, 1, False))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        [0, 5],  # narrow rows in fp32, wide ragged rows in bf16
    ),
)
def test_values_and_gradients(rows: int, n: int, residual: bool, dtype: torch.dtype) -> None:
    inputs = [nan_padded(rows, n, dtype=dtype), torch.randn(n, dtype=dtype)]
    if residual:
        inputs.append(nan_padded(rows, n, dtype=dtype, gap=5))
    grads = torch.randn(2, rows, n, dtype=dtype)
    names = ["y", "h"][: 1 + residual] + ["dx", "dw", "dresidual"][: len(inputs)]
    ours = results("own", dtype, inputs, grads)
    exact = results("reference", torch.float64, inputs, grads)
    assert_close(names, ours, exact, results("torch", dtype, inputs, grads))


@pytest.mark.parametrize(
    ("n", "residual", "quant"),
    select(
        [
            (n, residual, quant)
            for n, residual in ((100, False), (256, True), (700, True))
            for quant in ("row", "1x128")
        ],
        [1, 4],
    ),
)
def test_fp8_output_matches_the_reference(quant: str, n: int, residual: bool) -> None:
    x, w = nan_padded(3, n), torch.randn(n)
    x[1] = 0.0  # a row of zeros needs a scale too
    r = nan_padded(3, n) if residual else None
    if r is not None:
        r[1] = 0.0
    ours: Any = rms_norm(x, w, EPS, r, quant, backend="own")
    expected: Any = rms_norm(x, w, EPS, r, quant, backend="reference")
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-6, atol=0)
    steps = (ours[0].view(torch.uint8).int() - expected[0].view(torch.uint8).int()).abs()
    normal = expected[0].float().abs() >= 2**-6  # the interpreter flushes smaller values to zero
    assert steps[normal].max() <= 1 and steps[normal].float().mean() < 0.02
    if residual:
        torch.testing.assert_close(ours[2], expected[2])


def test_gradients_if_only_the_sum_or_the_norm_is_used() -> None:
    for pick in (0, 1):
        x, r, w = (
            t.requires_grad_() for t in (torch.randn(4, 32), torch.randn(4, 32), torch.randn(32))
        )
        got = torch.autograd.grad(
            rms_norm(x, w, EPS, r, backend="own")[pick].sum(), (x, r), allow_unused=True
        )
        want = torch.autograd.grad(rms_norm(x, w, EPS, r, backend="reference")[pick].sum(), (x, r))
        torch.testing.assert_close(got, want)


def test_leading_dimensions_and_strided_gradients() -> None:
    x = torch.randn(6, 3, 40).transpose(0, 1).requires_grad_()
    w = torch.randn(40, requires_grad=True)
    y: Any = rms_norm(x, w, EPS, backend="own")
    expected = reference.rms_norm(x, w, EPS)
    torch.testing.assert_close(y, expected)
    grad = torch.randn(40, 3, 6).permute(1, 2, 0)
    torch.testing.assert_close(
        torch.autograd.grad(y, (x, w), grad), torch.autograd.grad(expected, (x, w), grad)
    )


def test_the_choice_is_recorded() -> None:
    rms_norm(torch.randn(2, 24), torch.randn(24))
    empty: Any = rms_norm(torch.randn(0, 24), torch.randn(24))
    assert empty.shape == (0, 24)
    records = [(r["backend"], r["reason"]) for r in explain() if r["op"] == "rms_norm"]
    assert ("own", "first in the default order") in records
