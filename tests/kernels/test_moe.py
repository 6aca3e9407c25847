"""A mixture of experts on a CPU: each part against a loop over tokens, gradients, and bad
arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain
from kernels.gpu.moe import random_layer, run_layer
from kernels.moe import grouped_matmul, moe_gate, moe_permute, moe_unpermute


def test_the_layer_matches_a_loop_over_tokens_with_gradients() -> None:
    options = [t.double() for t in random_layer(7, 4, 6, 5, torch.float64)]
    x, logits, w, weights = (t.clone().requires_grad_() for t in options)
    values, chosen = logits.softmax(-1).topk(2)
    values = values / values.sum(-1, keepdim=True)
    out = torch.zeros(7, 5, dtype=torch.float64)
    for t in range(7):
        for k in range(2):
            if (t, k) != (0, 1):  # dropped
                out[t] = out[t] + values[t, k] * (w[chosen[t, k]] @ x[t])
    (out * weights).sum().backward()
    ours = run_layer(*options, top_k=2, backend=None)
    for got, expected in zip(ours, [out, x.grad, logits.grad, w.grad], strict=True):
        torch.testing.assert_close(got, expected)


def test_a_bias_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights, experts = moe_gate(logits, 1, scoring="sigmoid", bias=torch.tensor([0.0, 0.0, 5.0]))
    assert experts.tolist() == [[2]] and weights.item() == pytest.approx(0.5)


def test_experts_are_chosen_within_the_best_groups() -> None:
    logits = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.1, 0.7]]).logit(eps=1e-6)
    for scoring, top, expected in (
        ("sigmoid", 1, [2, 3]),
        ("softmax", 1, [0, 1]),
        ("sigmoid", 2, [0, 2]),
    ):
        _, experts = moe_gate(logits, 2, scoring=scoring, groups=3, top_k_groups=top)
        assert experts.tolist() == [expected], (scoring, top)


def test_sorted_rows_keep_token_order_and_dropped_ones_are_last() -> None:
    x = torch.arange(4.0).view(4, 1)
    rows, permutation = moe_permute(x, torch.tensor([[1], [2], [0], [1]]), 2)
    assert rows.flatten().tolist() == [2, 0, 3, 1] and permutation.counts.tolist() == [1, 2]
    assert moe_unpermute(rows, permutation).flatten().tolist() == [0, 1, 2, 3]


def test_the_reason_for_the_reference_on_a_cpu_is_recorded() -> None:
    dispatch.clear_records()
    grouped_matmul(torch.randn(3, 4), torch.randn(2, 5, 4), torch.tensor([1, 2]))
    (record,) = explain()
    assert record["backend"] == "reference" and "CPU" in str(record["reason"])
    assert grouped_matmul(torch.randn(0, 4), torch.randn(2, 5, 4), torch.tensor([0, 0])).shape == (
        0,
        5,
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: moe_gate(torch.randn(2, 4), 5), ValueError, "top_k is 5"),
        (lambda: moe_gate(torch.randn(2, 4), 1, groups=3), ValueError, "groups is 3"),
        (
            lambda: moe_gate(torch.randn(2, 4), 1, groups=2, top_k_groups=3),
            ValueError,
            "top_k_groups is 3",
        ),
        (
            lambda: moe_gate(torch.randn(2, 4), 3, groups=2, top_k_groups=1),
            ValueError,
            "contain 2 experts",
        ),
        (lambda: moe_gate(torch.randn(2, 4), 1, scoring="max"), ValueError, "scoring is 'max'"),
        (lambda: moe_gate(torch.randn(2, 4), 1, bias=torch.zeros(3)), ValueError, "bias has shape"),
        (
            lambda: moe_permute(torch.randn(2, 4), torch.tensor([[0], [4]]), 3),
            ValueError,
            "experts contain 4",
        ),
        (
            lambda: moe_permute(torch.randn(2, 4), torch.tensor([[0], [-1]]), 3),
            ValueError,
            "experts contain -1",
        ),
        (
            lambda: moe_permute(torch.randn(2, 4), torch.zeros(3, 1).long(), 3),
            ValueError,
            "experts has shape",
        ),
        (
            lambda: grouped_matmul(torch.randn(3, 4), torch.randn(2, 5, 4), torch.tensor([2, 2])),
            ValueError,
            "sum to 4",
        ),
        (
            lambda: grouped_matmul(torch.randn(3, 4), torch.randn(2, 5, 3), torch.tensor([1, 2])),
            ValueError,
            "w has shape",
        ),
        (
            lambda: grouped_matmul(
                torch.randn(3, 4), torch.randn(2, 5, 4).half(), torch.tensor([1, 2])
            ),
            TypeError,
            "equal",
        ),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
    _, permutation = moe_permute(torch.randn(2, 4), torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match="weights has shape"):
        moe_unpermute(torch.randn(2, 4), permutation, torch.ones(2, 2))
