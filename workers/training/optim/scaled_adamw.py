"""Fused AdamW of `kernels` that clips and unscales gradients inside the update.

One kernel launch that reads each gradient once, instead of a scaling pass before the update. Does
not depend on norms or loss scales, only on their combined factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.optim import FusedAdamW
from workers.metrics.memory import local_tensor


class ScaledAdamW(FusedAdamW):
    """The rule and state of torch.optim.AdamW, for plain tensors and local shards."""

    accepts_factor = skips_on_device = True

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        factor: float | Tensor = 1.0,
        skip: Tensor | None = None,
    ) -> None:
        """Update as if every gradient were multiplied by `factor`; gradients stay unchanged.

        A factor on the device has one element. `skip`: fp32, one element; nothing changes unless it
        is zero.
        """
        parameters = [
            each for group in self.param_groups for each in group["params"] if each.grad is not None
        ]
        if not parameters:
            return
        for each in parameters:
            if not local_tensor(each.grad).is_contiguous():
                each.grad = each.grad.contiguous()
        if skip is None and not isinstance(factor, Tensor) and factor == 1.0:
            super().step()
            return
        device = local_tensor(parameters[0]).device
        # filled on the device: an upload would wait for it
        scale = (
            factor.float().reshape(1)
            if isinstance(factor, Tensor)
            else torch.full((1,), factor, dtype=torch.float32, device=device)
        )
        # passing a norm makes the kernel skip its own measurement of the gradients
        super().step(inv_scale=scale, grad_norm=torch.ones(1, device=device), found_inf=skip)
