"""Muon: orthogonalized momentum for the matrices of blocks, AdamW for all other parameters.

The rule and constants of torch.optim.Muon. Torch 2.13's takes 2D parameters only, runs
Newton-Schulz in bf16 on CPUs too, and redistributes DTensors in each of its products. This one
takes stacks of matrices, sends a sharded matrix to one rank and back (`exchange`), and uses fp32 on
CPUs, which is faster and independent of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from workers.metrics.memory import local_tensor
from workers.training.optim.exchange import apply_to_full_matrices
from workers.training.optim.newton_schulz import orthogonalize, working_dtype


class Muon(Optimizer):
    """m ← lerp(m, g, 1 − μ); θ ← θ (1 − lr λ) − lr √max(1, R/C) · orthogonal(lerp(g, m, μ)).

    Groups with `matrices` true use this rule (stacks of matrices: matrix by matrix), others AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        rule = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "matrices": True}
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, **rule}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if group["matrices"]:
                self._orthogonal(parameters, group)
            elif parameters:
                self._adamw(parameters, group)

    def _orthogonal(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state, grad = self.state[parameter], local_tensor(parameter.grad)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            moment = local_tensor(state["momentum_buffer"])
            moment.lerp_(grad, 1 - group["momentum"])
            directions.append(
                grad.lerp_(moment, group["momentum"]) if group["nesterov"] else moment
            )
        lr, steps = group["lr"], group["ns_steps"]
        updates = apply_to_full_matrices(
            parameters,
            directions,
            lambda matrix: orthogonalize(matrix, steps=steps),
            dtype=working_dtype,
        )
        for parameter, update in zip(parameters, updates, strict=True):
            rows, columns = parameter.shape[-2:]
            weights = local_tensor(parameter)
            weights.mul_(1 - lr * group["weight_decay"])
            weights.sub_(update.to(weights), alpha=lr * math.sqrt(max(1.0, rows / columns)))

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=local_tensor(parameter).device
                )
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            states.append(state)
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(each) for each in parameters],
            [local_tensor(each.grad) for each in parameters if each.grad is not None],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
