"""Lion: the sign of an interpolated momentum (arXiv 2302.06675, algorithm 2); one state per
parameter.

Torch 2.13 has no Lion. Elementwise, so it applies to any shard of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor
from workers.training.optim.per_parameter import PerParameterOptimizer


class Lion(PerParameterOptimizer):
    """u = sign(β₁ m + (1 − β₁) g); θ ← θ (1 − lr λ) − lr u; m ← β₂ m + (1 − β₂) g."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        # one parameter at a time: the temporary has the size of a parameter, not of the model
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        weights, grad, moment = (
            local_tensor(parameter),
            local_tensor(gradient),
            local_tensor(state["exp_avg"]),
        )
        direction = moment.lerp(grad, 1 - beta1).sign_()
        weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        moment.lerp_(grad, 1 - beta2)
