"""Muon's orthogonalization: an approximate nearest semi-orthogonal matrix by Newton-Schulz steps.

Iteration of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), whose coefficients
make the slope at zero steep: singular values end between 0.7 and 1.2, which is sufficient.
"""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def working_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU, as published; fp32 on a CPU: faster, and equal for any number of ranks."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalize(matrices: Tensor, *, steps: int) -> Tensor:
    """Orthogonalize each matrix of `[…, R, C]`; keeps shape and dtype."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x
