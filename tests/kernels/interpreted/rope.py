"""apply_rope's kernel: halves and interleaved, part of the head, GQA, ragged heads, gradients,
cache writes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import apply_rope
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select


def tables(pairs: int, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(length, pairs)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("heads", "dim", "pairs", "interleaved", "dtype"),
    select(
        [
            (*shape, dtype)
            for shape in ((3, 16, 8, False), (2, 20, 6, True))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        [2, 3],
    ),
)
def test_values_and_gradients(
    heads: int, dim: int, pairs: int, interleaved: bool, dtype: torch.dtype
) -> None:
    inputs = [nan_padded(2, 3, heads, dim, dtype=dtype), nan_padded(2, 3, 1, dim, dtype=dtype)]
    cos, sin = tables(pairs)
    positions = torch.tensor([[0, 4, 11], [3, 2, 1]])
    grads = [torch.randn(t.shape).to(dtype) for t in inputs]

    def results(backend: str, expected: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(expected).requires_grad_() for t in inputs]
        rotated: Any = apply_rope(
            *leaves, cos, sin, positions, interleaved=interleaved, backend=backend
        )
        torch.autograd.backward(rotated, [g.to(expected) for g in grads])
        return [*rotated, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    assert_close(
        ["q", "k", "dq", "dk"],
        results("own", dtype),
        results("reference", torch.float64),
        results("reference", dtype),
    )


def test_positions_may_be_left_out() -> None:
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 2, 8)
    cos, sin = tables(4)
    ours: Any = apply_rope(q, k, cos, sin, backend="own")
    torch.testing.assert_close(
        ours, apply_rope(q, k, cos, sin, torch.arange(5), backend="reference")
    )


@pytest.mark.parametrize("block_size", select([4, 3], [1]))
def test_keys_and_values_are_written_to_their_slots_only(block_size: int) -> None:
    q, k, v = nan_padded(4, 3, 16), nan_padded(4, 2, 16), nan_padded(4, 2, 24)
    cos, sin = tables(8)
    slots, positions = torch.tensor([7, -1, 0, 5]), torch.tensor([1, 2, 3, 4])

    def written(backend: str) -> list[torch.Tensor]:
        caches = [torch.full((3, block_size, 2, 16), 9.0), torch.full((3, block_size, 2, 24), 9.0)]
        rotated: Any = apply_rope(q, k, cos, sin, positions, (v, *caches, slots), backend=backend)
        return [rotated, *caches]

    torch.testing.assert_close(written("own"), written("reference"))
