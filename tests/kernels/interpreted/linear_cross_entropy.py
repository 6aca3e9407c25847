"""The row kernel under linear cross-entropy: several blocks a row, ragged chunks, caps, ignored
targets, shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cross_entropy.row_kernel import VocabularyShard, stats_and_grads
from kernels.gpu.linear_cross_entropy import results
from tests.kernels.compare import amid_nan, assert_close
from tests.matrix import select

NAMES = ["loss", "dh", "dw"]


@pytest.mark.parametrize(
    ("options", "dtype"),
    select(
        [
            ({"chunk": 3, "softcap": 1.5, "reduction": "none"}, torch.float32),
            ({"chunk": 8}, torch.bfloat16),
            ({"chunk": 4}, torch.float32),
            ({"chunk": 16, "softcap": 1.5, "reduction": "sum"}, torch.float32),
            ({"reduction": "none"}, torch.float16),
        ],
        2,
    ),
)
def test_loss_and_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    h, w = amid_nan(7, 24, dtype=dtype), amid_nan(131, 24, dtype=dtype)
    inputs = (h, w, torch.tensor([0, 130, -100, 64, 5, 5, -100]))
    ours, plain = (
        results("own", inputs, dtype, **options),
        results("torch", inputs, dtype, **options),
    )
    exact = results(
        "reference", inputs, torch.float64, **{k: v for k, v in options.items() if k != "chunk"}
    )
    assert_close(NAMES, ours, exact, plain, floor=2e-6 if dtype == torch.float32 else None)


@pytest.mark.parametrize("softcap", select([0.0, 2.0], [1]))
def test_a_shards_rows_are_what_torch_gives(softcap: float) -> None:
    logits, targets = torch.randn(5, 90), torch.tensor([40, 129, 130, -100, 39])
    vocabulary, weights, lse = VocabularyShard(40, -100, softcap), torch.rand(5), torch.full((5,), 5.0)
    for given, weight in ((None, None), (lse, weights)):
        mine, theirs = logits.clone(), logits.clone()
        got = stats_and_grads(mine, targets, vocabulary, own=True, lse=given, weights=weight)
        want = stats_and_grads(theirs, targets, vocabulary, own=False, lse=given, weights=weight)
        torch.testing.assert_close(mine, theirs)
        if given is None:
            torch.testing.assert_close(got, want)
