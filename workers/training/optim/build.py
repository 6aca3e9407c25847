"""From an optimizer's spec to an optimizer over plain or sharded parameters, its state whole or
split (ZeRO-1).

Knows the rules by name and their options; does not know schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from workers.contracts.specs.plan import Offload
from workers.contracts.specs.run_bodies import OptimizerSpec
from workers.training.optim.adafactor import Adafactor
from workers.training.optim.adamw8bit import AdamW8bit
from workers.training.optim.lion import Lion
from workers.training.optim.muon import Muon
from workers.training.optim.parameter_layout import layout_of
from workers.training.optim.update import fused_adamw
from workers.training.optim.zero1 import Groups, SplitOptimizer, state_of

Among = Callable[[Tensor], dist.ProcessGroup | None]


def build_optimizer(
    parameters: dict[str, Tensor],
    spec: OptimizerSpec,
    *,
    split_state: bool,
    among: Among = lambda _: None,
    offload: Offload = "none",
    scratch: Path | None = None,
    fused: bool = True,
) -> Optimizer:
    """All parameters decay alike, as torch.optim does it. `split_state`: ZeRO-1, each rank keeps
    its part of it.

    `among`: the ranks that share a parameter's state, None for all. `offload`: where state lives
    and the update runs;
    `scratch` is the folder of state on disk. Parameters that lie on the host are updated there in
    any case.

    Muon's rule is for the matrices of blocks; embeddings, head, norms and biases get AdamW's, at
    `scalar_lr`.
    Not `fused`: AdamW tensor by tensor, step by step.
    """
    kind, options = _options(spec)
    if kind is AdamW:
        own = fused_adamw(parameters.values()) if fused and offload == "none" else None
        kind = own or kind
        if own is None:
            options |= {"fused": True} if fused else {"foreach": False}
    groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
    if spec.name == "muon":
        matrices = {
            name
            for name, each in parameters.items()
            if name.startswith("blocks.") and each.ndim >= 2
        }
        ratio = 1.0 if spec.scalar_lr is None or not spec.lr else spec.scalar_lr / spec.lr
        groups = [
            {
                "params": [parameters[name] for name in parameters if name in matrices],
                "matrices": True,
            },
            {
                "params": [parameters[name] for name in parameters if name not in matrices],
                "matrices": False,
                "lr": spec.lr * ratio,
                "lr_ratio": ratio,
            },
        ]

    groups = [part for group in groups for part in _by_mesh(group)]

    def rule(some: Groups) -> Optimizer:
        return kind(some, **options)

    def placed(some: Groups) -> Optimizer:
        if offload == "none":
            return rule(some)
        from workers.training.offload import Disk, OffloadedOptimizer

        assert offload != "nvme" or scratch is not None, "state on disk needs a folder"
        return OffloadedOptimizer(
            some, rule, disk=Disk(scratch) if offload == "nvme" and scratch else None
        )

    return SplitOptimizer(groups, placed, among=among) if split_state else placed(groups)


def _by_mesh(group: dict[str, Any]) -> Groups:
    """torch's fused and foreach updates want tensors that are all plain, or all of one mesh."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        alike.setdefault(layout_of(parameter).mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in alike.values()] or [group]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def fill_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Make the state that a first step would make, weights unchanged, so that a checkpoint can be
    read into it.
    """
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
    return AdamW, {**common, **betas, "eps": spec.eps}
