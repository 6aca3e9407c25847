"""Ring attention on pools of ranks vs plain attention over full sequences, and what it sends."""

from __future__ import annotations

import pytest

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
    shape(4, shared=2),  # one position a rank of 4
    shape(12, shared=1),  # 3 a rank of 4: unequal chunks
    shape(20, shared=2),  # 5
    shape(20, width=12),  # latent attention's wider queries and keys
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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "near"),
    [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 1.2e-2), ("float16", 1.5e-3)],
)
def test_outputs_and_gradients_are_those_of_plain_attention(pools, size, dtype, near):
    for rank, errors in enumerate(
        pools(size).call(f"{RANKS}:attention_errors", dtype=dtype, shapes=SHAPES)
    ):
        for given, apart in zip(SHAPES, errors, strict=True):
            assert max(apart) < near, (rank, given, apart)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_keys_values_and_gradients_go_round_once_less_than_there_are_ranks(
    pools, size, dtype, item
):
    given = {
        "batch": 2,
        "held": 6,
        "heads": 6,
        "shared": 2,
        "width": 12,
        "value_width": 8,
        "dtype": dtype,
    }
    elements = 2 * 6 * 2 * (12 + 8)  # fewer key-value heads are not repeated on the way
    expected = {
        "forward": (size - 1) * elements * item,
        "backward": (size - 1) * elements * (item + 4),  # sums of gradients in fp32
    }
    assert pools(size).call(f"{RANKS}:sent_bytes", **given) == [expected] * size


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_drops_the_same_in_both_passes_and_keeps_the_mean(pools, size):
    for found in pools(size).call(f"{RANKS}:dropout_slopes", length=120, dropout=0.3):
        assert found["gradients"] == pytest.approx(found["differences"], rel=1e-6)
        assert found["mean"] == pytest.approx(1.0, abs=0.05) and found["mean"] != 1.0
