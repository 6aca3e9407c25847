"""The global gradient norm over plain and sharded gradients, and the one multiplication that clips and unscales them.

Does not know optimizers or loss scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor


def squared_norm(gradients: list[Tensor], holders: list[int]) -> Tensor:
    """This rank's share of the squared global gradient norm: summed over all ranks it counts each number once.

    `holders[i]` ranks of the world hold the same part of gradient i as this one does; meshes may differ from gradient
    to gradient. In fp64, so that clipping multiplies by the same factor however gradients are sharded: fp32 partial
    sums differ by 1e-7, which Adam's first steps blow up to 1e-4 of the loss within 20 steps.
    """
    norms = torch._foreach_norm([local_tensor(gradient) for gradient in gradients], 2, dtype=torch.float64)
    squares = torch.stack(list(norms)).square()
    return (squares / torch.tensor(holders, dtype=torch.float64, device=squares.device)).sum()


@torch.no_grad()
def scale_(gradients: list[Tensor], *, norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
    """Take the loss scale out, and bring the global norm (without that scale) to `limit` where it is above.

    One pass for both; torch's own 1e-6 in clipping's denominator.
    """
    factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
    if factor != 1.0 or loss_scale != 1.0:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor / loss_scale)
