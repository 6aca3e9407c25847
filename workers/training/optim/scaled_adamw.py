"""AdamW by `kernels` in the loop's terms: gradients are clipped and unscaled on their way into the
update.

One launch that reads every gradient once, in place of a pass that writes all of them back and the
update after it.
Knows neither norms nor loss scales, only the factor that both come to.
"""

from __future__ import annotations

import torch

from kernels.optim import FusedAdamW
from workers.metrics.memory import local_tensor


class ScaledAdamW(FusedAdamW):
    """torch.optim.AdamW's rule and state, over plain tensors or this rank's parts of sharded ones."""

    takes_factor = True

    @torch.no_grad()
    def step(self, closure: None = None, *, factor: float = 1.0) -> None:  # type: ignore[override]
        """As if every gradient had been multiplied by `factor` first; they stay as they are."""
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
        # a norm tells that the gradients were looked at: they are not measured again
        scale, seen = torch.tensor([[factor], [1.0]], dtype=torch.float32).to(
            local_tensor(parameters[0]).device
        )
        super().step(inv_scale=scale, grad_norm=seen)
