"""The update: AdamW or SGD over plain or sharded parameters, ZeRO-1's split of its state, gradient norm and clipping.

Does not know models or learning-rate schedules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from workers.contracts.bodies import OptimizerSpec
from workers.metrics.memory import local_tensor


def build_optimizer(parameters: Iterable[Tensor], spec: OptimizerSpec, *, split_state: bool) -> Optimizer:
    """All parameters decay alike, as torch.optim does it. `split_state`: ZeRO-1, each rank keeps its part of it."""
    kind, options = _options(spec)
    if not split_state:
        return kind(list(parameters), **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # one flat bucket a rank: one broadcast each, instead of one for every parameter
    return ZeroRedundancyOptimizer(list(parameters), kind, parameters_as_bucket_view=True, **options)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """State by parameter, of this rank's part."""
    return cast(dict[Tensor, dict[str, Any]], getattr(optimizer, "optim", optimizer).state)


def fill_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Make the state that a first step would make, weights unchanged, so that a checkpoint can be read into it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


def squared_norm(gradients: list[Tensor], *, replicas: int) -> Tensor:
    """This rank's share of the squared global gradient norm: summed over all ranks it counts each number once.

    In fp64, so that clipping multiplies by the same factor however gradients are sharded: fp32 partial sums differ by
    1e-7, which Adam's first steps blow up to 1e-4 of the loss within 20 steps.
    """
    norms = torch._foreach_norm([local_tensor(gradient) for gradient in gradients], 2, dtype=torch.float64)
    return torch.stack(list(norms)).square().sum() / replicas


@torch.no_grad()
def clip_(gradients: list[Tensor], *, norm: float, limit: float) -> None:
    """Scale so that the global norm is at most `limit`, with torch's own 1e-6 in the denominator."""
    factor = limit / (norm + 1e-6)
    if factor < 1.0:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)


def _options(spec: OptimizerSpec) -> tuple[type[Optimizer], dict[str, Any]]:
    if spec.name == "sgd":
        options = {"momentum": spec.momentum, "nesterov": spec.nesterov, "weight_decay": spec.weight_decay}
        return SGD, {"lr": spec.lr, **options, "foreach": True}
    betas = {"betas": tuple(spec.betas), "eps": spec.eps, "weight_decay": spec.weight_decay}
    return AdamW, {"lr": spec.lr, **betas, "fused": True}
