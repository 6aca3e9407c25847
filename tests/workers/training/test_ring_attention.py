"""Ring attention on pools of ranks vs attention over full sequences, and the bytes it sends."""

from __future__ import annotations

import itertools

import pytest

from tests.matrix import select

RANKS = "tests.workers.training.ring_ranks"


def shape(length, heads=4, shared=4, width=8, value_width=8, window=None, starts=None):
    return {
        "length": length,
        "heads": heads,
        "shared": shared,
        "width": width,
        "value_width": value_width,
        "window": window,
        "starts": starts,
    }


SHAPES = [
    shape(16),
    shape(4, shared=2),  # one position per rank of 4
    shape(12, shared=1),  # 3 positions per rank of 4: unequal chunks
    shape(20, shared=2),  # 5
    shape(20, width=12),  # queries and keys wider than values, as in latent attention
    shape(28, value_width=12),
    shape(24, shared=2, window=1),
    shape(24, shared=2, window=5),
    shape(40, width=12, window=11),
    shape(40, width=12, window=25),
    shape(136, shared=2, width=16, value_width=16),
    shape(24, shared=2, starts=[[0, 1, 5, 6, 13, 22], [0]]),
    shape(24, shared=2, window=3, starts=[[0, 9, 14], [0, 1, 2, 3, 4, 20]]),
    shape(408, value_width=12, starts=[[0, 3, 7, 180, 200, 210], [0, 303, 407]]),
]


TOLERANCES = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 1.2e-2, "float16": 1.5e-3}


@pytest.mark.parametrize(
    ("dtype", "size"), select(itertools.product(TOLERANCES, [2, 4]), [0, 1, 3, 4, 7])
)
def test_outputs_and_gradients_equal_plain_attention(pools, size, dtype):
    for rank, errors in enumerate(
        pools(size).call(f"{RANKS}:attention_errors", dtype=dtype, shapes=SHAPES)
    ):
        for case, error in zip(SHAPES, errors, strict=True):
            assert max(error) < TOLERANCES[dtype], (rank, case, error)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_keys_values_and_gradients_are_sent_once_less_than_ranks(pools, size, dtype, item):
    args = {
        "batch": 2,
        "local_length": 6,
        "heads": 6,
        "shared": 2,
        "width": 12,
        "value_width": 8,
        "dtype": dtype,
    }
    elements = 2 * 6 * 2 * (12 + 8)  # shared key-value heads are sent once
    expected = {
        "forward": (size - 1) * elements * item,
        "backward": (size - 1) * elements * (item + 4),  # sums of gradients in fp32
    }
    assert pools(size).call(f"{RANKS}:sent_bytes", **args) == [expected] * size


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_masks_match_in_both_passes_and_keep_the_mean(pools, size):
    for slopes in pools(size).call(f"{RANKS}:dropout_slopes", length=120, dropout=0.3):
        assert slopes["gradients"] == pytest.approx(slopes["differences"], rel=1e-6)
        assert slopes["mean"] == pytest.approx(1.0, abs=0.05) and slopes["mean"] != 1.0
