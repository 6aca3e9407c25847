"""Fused AdamW of `kernels` that clips and unscales gradients inside the update.

One kernel launch that reads each gradient once, instead of a scaling pass before the update. Does
not depend on norms or loss scales, only on their combined factor.
"""

from __future__ import annotations

import torch

from kernels.optim import FusedAdamW
from workers.metrics.memory import local_tensor


class ScaledAdamW(FusedAdamW):
    """The rule and state of torch.optim.AdamW, for plain tensors and local shards."""

    accepts_factor = True

    @torch.no_grad()
    def step(self, closure: None = None, *, factor: float = 1.0) -> None:  # type: ignore[override]
        """Update as if every gradient were multiplied by `factor`; gradients stay unchanged."""
        parameters = [
            each for group in self.param_groups for each in group["params"] if each.grad is not None
        ]
        if not parameters:
            return
        for each in parameters:
            if not local_tensor(each.grad).is_contiguous():
                each.grad = each.grad.contiguous()
        if factor == 1.0:
            super().step()
            return
        # passing a norm makes the kernel skip its own measurement of the gradients
        scale, seen = torch.tensor([[factor], [1.0]], dtype=torch.float32).to(
            local_tensor(parameters[0]).device
        )
        super().step(inv_scale=scale, grad_norm=seen)
