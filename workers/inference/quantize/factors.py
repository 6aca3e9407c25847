"""Linears as products of two thin ones, by the singular values of what they do to the inputs that
occur.

Truncation of W · L, with L · Lᵀ the inputs' Gram matrix, has the least error of outputs of all
matrices of its rank
(SVD-LLM, arXiv 2403.07378, section 3.1). Shapes: N outputs, K inputs, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.inference.quantize.calibrate import damped
from workers.models.hf.packed import Packed


def low_rank(weight_NK: Tensor, gram_KK: Tensor, *, rank: int) -> Packed:
    """Factors `[N, R]` and `[R, K]` in the weight's dtype."""
    lower = torch.linalg.cholesky(damped(gram_KK, 1e-3))
    left, values, right = torch.linalg.svd(weight_NK.float() @ lower, full_matrices=False)
    root = values[:rank].sqrt()
    # right · L⁻¹, by solving from the other side
    back = torch.linalg.solve_triangular(lower, right[:rank], upper=False, left=False)
    factors = (left[:, :rank] * root, root.unsqueeze(1) * back)
    return Packed("low-rank", *(each.to(weight_NK.dtype).contiguous() for each in factors))


def rank_for(weight_NK: Tensor, keep: float) -> int:
    """Such that the factors have the share `keep` of the weight's numbers."""
    outputs, inputs = weight_NK.shape
    return max(1, int(keep * outputs * inputs / (outputs + inputs)))
