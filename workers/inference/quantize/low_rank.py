"""Low-rank factors of a linear, by a singular value decomposition weighted by its inputs.

Truncating W · L, with L · Lᵀ the inputs' Gram matrix, minimizes the output error among all matrices
of that rank (SVD-LLM, arXiv 2403.07378, section 3.1). Shapes: N outputs, K inputs, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.inference.quantize.calibrate import damped
from workers.models.hf.quantized_formats import Packed


def low_rank(weight_NK: Tensor, gram_KK: Tensor, *, rank: int) -> Packed:
    """Factors `[N, R]` and `[R, K]` in the weight's dtype."""
    lower = torch.linalg.cholesky(damped(gram_KK, 1e-3))
    left, values, right = torch.linalg.svd(weight_NK.float() @ lower, full_matrices=False)
    root = values[:rank].sqrt()
    # right · L⁻¹
    back = torch.linalg.solve_triangular(lower, right[:rank], upper=False, left=False)
    factors = (left[:, :rank] * root, root.unsqueeze(1) * back)
    return Packed("low-rank", *(x.to(weight_NK.dtype).contiguous() for x in factors))


def rank_for(weight_NK: Tensor, keep: float) -> int:
    """The rank at which the factors have the share `keep` of the weight's numbers."""
    outputs, inputs = weight_NK.shape
    return max(1, int(keep * outputs * inputs / (outputs + inputs)))
