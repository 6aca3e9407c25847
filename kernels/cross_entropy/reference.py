"""Linear cross-entropy by its definition: all logits, in fp32 (fp64 stays fp64)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear_cross_entropy(
    h_NH: Tensor,
    w_VH: Tensor,
    targets_N: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    softcap: float,
) -> Tensor:
    """-log softmax(cap(h·wᵀ))[target]: `[N]` for "none", else the mean over counted targets, or the
    sum.
    """
    kind = torch.float64 if h_NH.dtype == torch.float64 else torch.float32
    logits = h_NH.to(kind) @ w_VH.to(kind).T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(
        logits, targets_N.long(), ignore_index=ignore_index, reduction=reduction
    )
