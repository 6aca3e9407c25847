"""The eight-bit kernel: ragged sizes, three types, several splits, odd strides."""

from __future__ import annotations

import pytest
import torch

from kernels.int8 import int8_matmul, quantize_int8
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    select(
        [
            (m, n, k, dtype)
            for m, n, k in ((17, 33, 70), (3, 40, 300))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ]
    ),
)
def test_products_with_several_splits(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = nan_padded(m, k, dtype=dtype)
    q, scales = quantize_int8(torch.randn(n, k).to(dtype))
    exact = x.double() @ (q.double() * scales.double().unsqueeze(1)).T
    plain = int8_matmul(x, q, scales, backend="reference")
    for splits in (1, 2):
        ours = int8_matmul(x, q, scales, num_splits=splits, backend="own")
        assert_close(
            ["out"], [ours], [exact], [plain], floor=5e-6 if dtype == torch.float32 else None
        )
