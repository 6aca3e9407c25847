"""The row kernel of linear cross-entropy: several blocks per row, ragged chunks, caps, ignored
targets, shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cross_entropy.row_kernel import VocabularyShard, stats_and_grads
from kernels.gpu.linear_cross_entropy import results
from tests.kernels.compare import assert_close, nan_padded
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
    h, w = nan_padded(7, 24, dtype=dtype), nan_padded(131, 24, dtype=dtype)
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
def test_rows_of_a_shard_match_torch(softcap: float) -> None:
    logits, targets = torch.randn(5, 90), torch.tensor([40, 129, 130, -100, 39])
    vocabulary, weights, lse = (
        VocabularyShard(40, -100, softcap),
        torch.rand(5),
        torch.full((5,), 5.0),
    )
    for given_lse, weight in ((None, None), (lse, weights)):
        ours_grad, torch_grad = logits.clone(), logits.clone()
        got = stats_and_grads(
            ours_grad, targets, vocabulary, own=True, lse=given_lse, weights=weight
        )
        want = stats_and_grads(
            torch_grad, targets, vocabulary, own=False, lse=given_lse, weights=weight
        )
        torch.testing.assert_close(ours_grad, torch_grad)
        if given_lse is None:
            torch.testing.assert_close(got, want)
