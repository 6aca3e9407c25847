"""The fp8 kernels: quantising rows and blocks, products in any number of parts; ragged, zeros, NaN,
odd strides.
"""

from __future__ import annotations

import pytest
import torch

from kernels import fp8_matmul, quantize_1x128, quantize_128x1, quantize_128x128
from kernels.fp8 import reference
from kernels.gpu.fp8_matmul import quantised
from tests.kernels.compare import amid_nan, assert_close
from tests.matrix import select


@pytest.mark.parametrize("dtype", select([torch.float32, torch.bfloat16]))
def test_quantised_as_the_reference_does(dtype: torch.dtype) -> None:
    x = amid_nan(140, 200, dtype=dtype)
    x[3], x[0, 0] = 0.0, 3e4
    for quantise, rows, columns in (
        (quantize_1x128, 1, 128),
        (quantize_128x128, 128, 128),
        (quantize_128x1, 128, 1),
    ):
        q, scale = quantise(x, backend="own")
        wanted, wanted_scale = quantise(x, backend="reference")
        torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
        pairs = ((q, scale), (wanted, wanted_scale))
        back, plain = (reference.dequantize(*each, rows, columns=columns) for each in pairs)
        # the interpreter's e4m3 loses subnormals and, in some roundings up, the carry to the
        # exponent
        same = torch.isclose(back, plain, rtol=2**-3, atol=float(2**-6 * scale.min())) | (
            wanted.float().abs() < 2**-6
        )
        assert same.float().mean() > 0.98


def test_a_nan_shows_in_its_tile_alone() -> None:
    x = torch.randn(3, 300)
    x[1, 130] = torch.nan
    for quantise in (quantize_1x128, quantize_128x1, quantize_128x128):
        scale = quantise(x, backend="own")[1]
        assert (
            torch.equal(scale.isnan(), quantise(x, backend="reference")[1].isnan())
            and scale.isnan().sum() == 1
        )


@pytest.mark.parametrize(("m", "n", "k"), select([(5, 70, 300), (33, 40, 128), (2, 140, 640)]))
def test_products_in_any_number_of_parts(m: int, n: int, k: int) -> None:
    given = quantised(m, n, k)
    exact = reference.fp8_matmul(*given, torch.float64)
    for splits in (1, 2):
        ours = fp8_matmul(*given, torch.float32, num_splits=splits, backend="own")
        assert_close(["out"], [ours], [exact], [reference.fp8_matmul(*given)], floor=2e-6)
