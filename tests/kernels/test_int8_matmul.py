"""Eight-bit weights on a CPU: rounding, products by torch's kernel, and bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain
from kernels.int8 import int8_matmul, quantize_int8


def test_numbers_are_within_half_a_step() -> None:
    w = torch.randn(9, 70)
    w[2] = 0.0
    q, scales = quantize_int8(w)
    assert (
        q.dtype == torch.int8
        and ((q * scales.unsqueeze(1) - w).abs() <= scales.unsqueeze(1) * 0.501).all()
    )


@pytest.mark.parametrize("k", [70, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_match_the_dequantized_weight(dtype: torch.dtype, k: int) -> None:
    x = torch.randn(2, 3, k).to(dtype)
    w = torch.randn(9, k).to(dtype)
    w[3] = 0.0
    q, scales = quantize_int8(w)
    assert (scales > 0).all() and not q[3].any()
    expected = x.double() @ (q.double() * scales.double().unsqueeze(1)).T
    dispatch.clear_records()
    got = int8_matmul(x, q, scales)
    torch.testing.assert_close(
        got.double(), expected, rtol=2e-2, atol={torch.float32: 1e-4}.get(dtype, 0.1)
    )
    odd = torch.stack((q, q), dim=1)[:, 0]  # rows with gaps
    torch.testing.assert_close(int8_matmul(x, odd, scales), got, rtol=2e-2, atol=0.1)
    assert explain()[0]["backend"] == "torch" and "CPU" in str(explain()[0]["reason"])
    assert int8_matmul(x[:0], q, scales).shape == (0, 3, 9)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.randn(2, 60)}, ValueError, "qweight has shape"),
        ({"qweight": torch.randn(9, 70)}, TypeError, "qweight is float32"),
        ({"scales": torch.ones(8)}, ValueError, "scales has shape"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, scales = quantize_int8(torch.randn(9, 70))
    good: dict[str, Any] = {"x": torch.randn(2, 70), "qweight": q, "scales": scales}
    assert int8_matmul(**good).shape == (2, 9)
    with pytest.raises(error, match=message):
        int8_matmul(**{**good, **changes})
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_int8(torch.full((2, 2), float("inf")))
