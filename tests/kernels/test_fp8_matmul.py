"""Block-scaled fp8 on a CPU: rounding errors, products, cuBLASLt's layouts, and bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain, fp8_matmul, quantize_1x128, quantize_128x128
from kernels.fp8 import reference, torch_scaled_mm
from kernels.gpu.fp8_matmul import quantized_operands


def test_quantized_numbers_are_within_e4m3_rounding() -> None:
    x = torch.randn(2, 70, 300) * torch.logspace(-3, 3, 70).unsqueeze(1)
    q, scale = quantize_1x128(x)
    assert q.shape == x.shape and scale.shape == (2, 70, 3) and q.dtype == torch.float8_e4m3fn
    back = reference.dequantize(q.view(140, 300), scale.view(140, 3), 1).view_as(x)
    assert (
        (back - x).abs() <= x.abs() / 16 + scale.repeat_interleave(128, -1)[..., :300] * 2**-9
    ).all()
    w = torch.randn(200, 300)
    q, scale = quantize_128x128(w)
    assert scale.shape == (2, 3) and q.float().abs().max() == 448
    assert (reference.dequantize(q, scale, 128) - w).norm() / w.norm() < 0.04


def test_tiles_of_zeros_and_empty_tensors() -> None:
    q, scale = quantize_1x128(torch.zeros(2, 130))
    assert not q.float().any() and (scale > 0).all()
    q, scale = quantize_1x128(torch.zeros(0, 130))
    assert fp8_matmul(q, scale, *quantize_128x128(torch.ones(5, 130))).shape == (0, 5)


def test_products_match_the_dequantized_numbers() -> None:
    a, sa, b, sb = quantized_operands(6, 150, 300)
    expected = (
        reference.dequantize(a, sa, 1, torch.float64)
        @ reference.dequantize(b, sb, 128, torch.float64).T
    )
    dispatch.clear_records()
    got = fp8_matmul(a.view(2, 3, 300), sa.view(2, 3, 3), b, sb, torch.float32)
    torch.testing.assert_close(got.view(6, 150).double(), expected, rtol=1e-4, atol=1e-2)
    (record,) = explain()
    assert record["backend"] == "reference" and "block scales" in str(record["reason"])
    assert fp8_matmul(a, sa, b, sb).dtype == torch.bfloat16


def test_padded_cublas_operands_have_the_same_values() -> None:
    a, sa, b, sb = quantized_operands(5, 150, 300)
    x, x_scales, y, y_scales = torch_scaled_mm.operands(a, sa, b, sb)
    assert x.shape == (16, 384) and y.shape == (384, 160) and y.stride() == (1, 384)
    assert x_scales.stride() == (1, 16) and y_scales.shape == (4, 2) and y_scales.stride() == (1, 4)
    same = reference.fp8_matmul(x, x_scales, y.t(), y_scales.t()[:, :3])[:5, :150]
    torch.testing.assert_close(same, reference.fp8_matmul(a, sa, b, sb), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": torch.randn(2, 130)}, TypeError, "a is float32"),
        ({"sa": torch.ones(2, 1)}, ValueError, "sa has shape"),
        ({"sb": torch.ones(2, 2)}, ValueError, "sb has shape"),
        ({"sb": torch.ones(1, 2).double()}, TypeError, "sb is float64"),
        ({"b": torch.zeros(5, 128).to(torch.float8_e4m3fn)}, ValueError, "b has shape"),
        ({"out_dtype": torch.int8}, ValueError, "out_dtype is"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    (a, sa), (b, sb) = quantize_1x128(torch.randn(2, 130)), quantize_128x128(torch.randn(5, 130))
    good: dict[str, Any] = {"a": a, "sa": sa, "b": b, "sb": sb}
    assert fp8_matmul(**good).shape == (2, 5)
    with pytest.raises(error, match=message):
        fp8_matmul(**{**good, **changes})


def test_unquantizable_tensors_are_rejected() -> None:
    with pytest.raises(TypeError, match="x is int64"):
        quantize_1x128(torch.arange(4))
    with pytest.raises(ValueError, match="w has 3 dimensions"):
        quantize_128x128(torch.zeros(2, 3, 4))
