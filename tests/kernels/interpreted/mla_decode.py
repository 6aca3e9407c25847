"""The latent kernel: ragged, empty, several query tokens, several splits, and widths that
are not powers of two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import mla_decode
from kernels.gpu.mla_decode import random_latents, to_fp64
from tests.kernels.compare import assert_close
from tests.matrix import select


@pytest.mark.parametrize(
    ("case", "dtype"),
    select(
        [
            (
                {"lens": (3, 21), "heads": 9, "queries": 2, "widths": (24, 8), "page": 8},
                torch.float32,
            ),
            ({"lens": (5, 0, 37), "heads": 6}, torch.float32),
            ({"lens": (33,), "heads": 4}, torch.float16),
            ({"lens": (33,), "heads": 4}, torch.bfloat16),
        ]
    ),
)
def test_several_splits(case: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = random_latents(**case, dtype=dtype)
    exact: Any = mla_decode(**to_fp64(inputs), scale=0.2, return_lse=True, backend="reference")
    plain: Any = mla_decode(**inputs, scale=0.2, backend="torch")
    for splits in (1, 3):
        ours: Any = mla_decode(
            **inputs, scale=0.2, num_splits=splits, return_lse=True, backend="own"
        )
        assert_close(
            ["out"], ours[:1], exact[:1], [plain], floor=2e-6 if dtype == torch.float32 else None
        )
        assert_close(["lse"], ours[1:], exact[1:], exact[1:], floor=1e-6)
