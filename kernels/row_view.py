"""Views of a tensor with any leading dimensions as rows, for kernels that take two dimensions."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., N] as [rows, N] with contiguous rows; a view if the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
