"""Gradients averaged in buckets equal those of one process, sent early or late."""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.zero1_ranks import SHAPES, draw

RANKS = "tests.workers.training.zero1_ranks"


def mean_of_two(micro_batches):
    sums = [
        {
            name: sum(draw(100 + 10 * index + dp)[name] for index in range(micro_batches))
            for name in SHAPES
        }
        for dp in (0, 1)
    ]
    return {name: (sums[0][name] + sums[1][name]) / 2 for name in SHAPES}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "tensor parallel"])
@pytest.mark.parametrize(
    ("bucket_bytes", "micro_batches", "late"), [(1, 1, False), (600, 3, False), (1 << 20, 2, True)]
)
def test_means_equal_those_of_all_ranks(sharded, bucket_bytes, micro_batches, late, pools):
    args = {
        "sharded": sharded,
        "bucket_bytes": bucket_bytes,
        "micro_batches": micro_batches,
        "late": late,
    }
    for rank in pools(4).call(f"{RANKS}:reduce_gradients", **args):
        for name, expected in mean_of_two(micro_batches).items():
            torch.testing.assert_close(torch.tensor(rank["gradients"][name]), expected)
        # sends all during the last micro-batch and none before; if late, all at the end
        assert rank["launched"] == [0] * (micro_batches - 1) + [0 if late else rank["buckets"]]
        assert rank["buckets"] == (1 if late else len(SHAPES)) or 1 < rank["buckets"] < len(SHAPES)


def test_a_parameter_without_gradient_is_named(pools):
    for message in pools(2).call(f"{RANKS}:reduce_without_gradient", name="router.bias"):
        assert "no gradient for router.bias" in message and "every rank" in message


def test_a_gradient_that_changes_after_reduction_is_an_error(pools):
    for message in pools(2).call(f"{RANKS}:reduce_twice"):
        assert "gradient of a changed" in message and "last micro-batch" in message
