"""The kernels of a mixture of experts: gate, permutation, grouped products, gradients; ragged,
empty, dropped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.moe import NAMES, random_layer, run_layer
from kernels.moe import grouped_matmul, moe_gate, moe_permute, moe_unpermute
from tests.kernels.compare import assert_close
from tests.matrix import select


@pytest.mark.parametrize("dtype", select([torch.float32, torch.bfloat16]))
def test_a_layer_and_its_gradients(dtype: torch.dtype) -> None:
    inputs = random_layer(19, 3, 40, 24, dtype)
    exact = run_layer(*(t.double() for t in inputs), top_k=2, backend="reference")
    plain = run_layer(*inputs, top_k=2, backend="reference")
    assert_close(
        NAMES,
        run_layer(*inputs, top_k=2, backend="own"),
        exact,
        plain,
        floor=2e-6 if dtype == torch.float32 else 2e-2,
    )


@pytest.mark.parametrize(
    "options",
    select(
        [
            {"bias": torch.linspace(0, 1, 12), "groups": 3, "top_k_groups": 2},
            {"scoring": "sigmoid", "groups": 4, "top_k_groups": 2},
            {"bias": torch.linspace(0, 1, 12), "renormalise": True},
            {"scoring": "sigmoid", "scale": 2.5},
            {},
        ],
        3,
    ),
)
def test_the_gate_matches_the_reference(options: dict[str, Any]) -> None:
    logits = torch.randn(12, 9).t()  # odd strides
    weights, experts = moe_gate(logits, 3, backend="own", **options)
    wanted_weights, expected = moe_gate(logits, 3, backend="reference", **options)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, wanted_weights)


def test_without_weights_rows_of_a_token_are_summed() -> None:
    x, experts = (
        torch.randn(5, 40, requires_grad=True),
        torch.tensor([[0, 2], [2, 1], [3, 3], [0, 1], [2, 0]]),
    )
    rows, permutation = moe_permute(x, experts, 3, backend="own")
    assert permutation.counts.tolist() == [3, 2, 3]
    out = moe_unpermute(rows, permutation, backend="own")
    torch.testing.assert_close(out, 2 * x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_rows_without_an_expert_are_zeros() -> None:
    x, w = torch.randn(20, 33), torch.randn(2, 17, 33)
    counts = torch.tensor([0, 3])
    got = grouped_matmul(x, w, counts, backend="own")
    torch.testing.assert_close(got, grouped_matmul(x, w, counts, backend="reference"))
    assert not got[3:].any()
