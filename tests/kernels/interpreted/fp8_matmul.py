"""The fp8 kernels: quantization of rows and blocks, products with several splits; ragged, zeros,
NaN, odd strides.
"""

from __future__ import annotations

import pytest
import torch

from kernels import fp8_matmul, quantize_1x128, quantize_128x1, quantize_128x128
from kernels.fp8 import reference
from kernels.gpu.fp8_matmul import quantized_operands
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select


@pytest.mark.parametrize("dtype", select([torch.float32, torch.bfloat16]))
def test_quantization_matches_the_reference(dtype: torch.dtype) -> None:
    x = nan_padded(140, 200, dtype=dtype)
    x[3], x[0, 0] = 0.0, 3e4
    for quantize, rows, columns in (
        (quantize_1x128, 1, 128),
        (quantize_128x128, 128, 128),
        (quantize_128x1, 128, 1),
    ):
        q, scale = quantize(x, backend="own")
        expected, wanted_scale = quantize(x, backend="reference")
        torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
        pairs = ((q, scale), (expected, wanted_scale))
        decoded, plain = (reference.dequantize(*pair, rows, columns=columns) for pair in pairs)
        # the interpreter's e4m3 loses subnormals and, in some roundings up, the carry to the
        # exponent
        same = torch.isclose(decoded, plain, rtol=2**-3, atol=float(2**-6 * scale.min())) | (
            expected.float().abs() < 2**-6
        )
        assert same.float().mean() > 0.98


def test_a_nan_affects_its_tile_only() -> None:
    x = torch.randn(3, 300)
    x[1, 130] = torch.nan
    for quantize in (quantize_1x128, quantize_128x1, quantize_128x128):
        scale = quantize(x, backend="own")[1]
        assert (
            torch.equal(scale.isnan(), quantize(x, backend="reference")[1].isnan())
            and scale.isnan().sum() == 1
        )


@pytest.mark.parametrize(("m", "n", "k"), select([(5, 70, 300), (33, 40, 128), (2, 140, 640)]))
def test_products_with_several_splits(m: int, n: int, k: int) -> None:
    operands = quantized_operands(m, n, k)
    exact = reference.fp8_matmul(*operands, torch.float64)
    for splits in (1, 2):
        ours = fp8_matmul(*operands, torch.float32, num_splits=splits, backend="own")
        assert_close(["out"], [ours], [exact], [reference.fp8_matmul(*operands)], floor=2e-6)
