"""From an optimizer's spec to an optimizer over plain or sharded parameters, its state whole or split (ZeRO-1).

Knows the rules by name and their options; does not know schedules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from workers.contracts.bodies import OptimizerSpec
from workers.training.optim.adafactor import Adafactor
from workers.training.optim.adamw8bit import AdamW8bit
from workers.training.optim.lion import Lion
from workers.training.optim.muon import Muon


def build_optimizer(parameters: dict[str, Tensor], spec: OptimizerSpec, *, split_state: bool) -> Optimizer:
    """All parameters decay alike, as torch.optim does it. `split_state`: ZeRO-1, each rank keeps its part of it.

    Muon's rule is for the matrices of blocks; embeddings, head, norms and biases get AdamW's, at `scalar_lr`.
    """
    kind, options = _options(spec)
    groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
    if spec.name == "muon":
        matrices = {name for name, each in parameters.items() if name.startswith("blocks.") and each.ndim >= 2}
        ratio = 1.0 if spec.scalar_lr is None or not spec.lr else spec.scalar_lr / spec.lr
        groups = [
            {"params": [parameters[name] for name in parameters if name in matrices], "matrices": True},
            {
                "params": [parameters[name] for name in parameters if name not in matrices],
                "matrices": False,
                "lr": spec.lr * ratio,
                "lr_ratio": ratio,
            },
        ]
    if not split_state:
        return kind(groups, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # one flat bucket a rank: one broadcast each, instead of one for every parameter
    return ZeroRedundancyOptimizer(groups, kind, parameters_as_bucket_view=True, **options)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


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
    for entry in state_of(optimizer).values():
        if isinstance(entry.get("step"), Tensor):
            entry["step"].zero_()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


def _options(spec: OptimizerSpec) -> tuple[type[Optimizer], dict[str, Any]]:
    common = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    momentum = {"momentum": spec.momentum, "nesterov": spec.nesterov}
    betas = {"betas": tuple(spec.betas)}
    match spec.name:
        case "sgd":
            return SGD, {**common, **momentum, "foreach": True}
        case "lion":
            return Lion, {**common, **betas}
        case "adafactor":
            return Adafactor, common
        case "muon":
            return Muon, {**common, **momentum, **betas, "eps": spec.eps, "ns_steps": spec.ns_steps}
        case "adamw8bit":
            return AdamW8bit, {**common, **betas, "eps": spec.eps}
    return AdamW, {**common, **betas, "eps": spec.eps, "fused": True}
