"""The four-bit kernels: all groups, ragged K and N, three types, several splits; and
dequantization.
"""

from __future__ import annotations

import pytest
import torch

from kernels import int4_matmul, pack_awq
from kernels.int4.matmul import _launch_dequantize
from kernels.int4.pack import dequantize
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "dtype"),
    select(
        [
            (17, 33, 208, 16, torch.float32),
            (3, 40, 300, 128, torch.float32),
            (2, 20, 600, 256, torch.float32),
            (2, 32, 160, 64, torch.float16),
            (2, 32, 160, 32, torch.bfloat16),
        ]
    ),
)
def test_products_with_several_splits(
    m: int, n: int, k: int, group: int, dtype: torch.dtype
) -> None:
    x = nan_padded(m, k, dtype=dtype)
    packed = pack_awq(torch.randn(n, k).to(dtype), group)
    exact = x.double() @ dequantize(*packed, group, k, torch.float64)
    plain = (x.float() @ dequantize(*packed, group, k, torch.float32)).to(dtype)
    for splits in (1, 2):
        ours = int4_matmul(x, *packed, group, num_splits=splits, backend="own")
        assert_close(
            ["out"], [ours], [exact], [plain], floor=5e-6 if dtype == torch.float32 else None
        )
    out = torch.empty(k, n)
    _launch_dequantize(*packed, group, out)
    torch.testing.assert_close(out, dequantize(*packed, group, k, torch.float32))
