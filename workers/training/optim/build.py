"""Builds an optimizer from its spec, over plain or sharded parameters, with full or ZeRO-1 state.

Does not depend on schedules.
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
from workers.contracts.specs.train import OptimizerSpec
from workers.training.optim.adafactor import Adafactor
from workers.training.optim.adamw8bit import AdamW8bit
from workers.training.optim.lion import Lion
from workers.training.optim.muon import Muon
from workers.training.optim.parameter_layout import get_layout
from workers.training.optim.update import fused_adamw
from workers.training.optim.zero1 import Groups, Zero1Optimizer, get_optimizer_state

ProcessGroupOf = Callable[[Tensor], dist.ProcessGroup | None]


def build_optimizer(
    parameters: dict[str, Tensor],
    spec: OptimizerSpec,
    *,
    shard_state: bool,
    process_group: ProcessGroupOf = lambda _: None,
    offload: Offload = "none",
    scratch: Path | None = None,
    host_threads: int | None = None,
    fused: bool = True,
    seed: int = 0,
) -> Optimizer:
    """Build the optimizer of `spec`; weight decay applies to all parameters, as in torch.optim.

    `shard_state`: ZeRO-1, each rank of a parameter's `process_group` (None: all ranks) keeps a part
    of the state. `offload`: where state lives and the update runs; `scratch` is the folder of state
    on disk, and `host_threads` the threads of an update on the host (None: as elsewhere).
    Parameters in host memory are always updated there.

    Muon's rule applies to the matrices of blocks; embeddings, head, norms and biases use AdamW with
    `scalar_lr`. `fused` false: AdamW updates one tensor at a time.

    16-bit parameters are updated in fp32 by AdamW, with fp32 moments, and rounded: bf16 ones
    stochastically, by `seed`, the step and the place in this rank's shard, so that copies of a
    shard stay equal.
    """
    cls, options = _options(spec)
    if any(each.dtype in (torch.bfloat16, torch.float16) for each in parameters.values()):
        cls, options = _narrow_adamw(spec, options, fused=fused, seed=seed)
    elif cls is AdamW:
        fused_class = fused_adamw(parameters.values()) if fused and offload == "none" else None
        cls = fused_class or cls
        if fused_class is None:
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

    if spec.lora_plus_ratio is not None:
        faster = {each for name, each in parameters.items() if name.endswith(".lora_B")}
        groups = [part for group in groups for part in _split(group, faster, spec.lora_plus_ratio)]
    groups = [part for group in groups for part in _by_mesh(group)]

    def make_rule(subset: Groups) -> Optimizer:
        return cls(subset, **options)

    def make_optimizer(subset: Groups) -> Optimizer:
        if offload == "none":
            return make_rule(subset)
        from workers.training.offload import Disk, OffloadedOptimizer

        assert offload != "nvme" or scratch is not None, "state on disk needs a folder"
        return OffloadedOptimizer(
            subset,
            make_rule,
            disk=Disk(scratch) if offload == "nvme" and scratch else None,
            threads=host_threads,
        )

    return (
        Zero1Optimizer(groups, make_optimizer, process_group=process_group)
        if shard_state
        else make_optimizer(groups)
    )


def _split(group: dict[str, Any], faster: set[Tensor], ratio: float) -> Groups:
    """LoRA+ (arXiv 2402.12354): `faster` parameters have `ratio` times the group's rate."""
    rest = [each for each in group["params"] if each not in faster]
    chosen = [each for each in group["params"] if each in faster]
    own = ratio * group.get("lr_ratio", 1.0)
    parts = [{**group, "params": rest}] if rest or not chosen else []
    return parts + ([{**group, "params": chosen, "lr_ratio": own}] if chosen else [])


def _by_mesh(group: dict[str, Any]) -> Groups:
    """One group per mesh: torch's fused and foreach updates take tensors of one mesh or plain
    ones.
    """
    alike: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        alike.setdefault(get_layout(parameter).mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in alike.values()] or [group]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group, scaled by the group's `lr_ratio`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def fill_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Create the state of a first step, weights unchanged, so that a checkpoint can be loaded into
    it.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    for entry in get_optimizer_state(optimizer).values():
        if isinstance(entry.get("step"), Tensor):
            entry["step"].zero_()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


def _narrow_adamw(
    spec: OptimizerSpec, options: dict[str, Any], *, fused: bool, seed: int
) -> tuple[type[Optimizer], dict[str, Any]]:
    assert spec.name == "adamw", f"{spec.name} has no rule for 16-bit weights"
    from workers.training.optim.scaled_adamw import ScaledAdamW  # loads triton

    rounding = {"stochastic_rounding": True, "seed": seed}
    return ScaledAdamW, options | rounding | ({} if fused else {"backend": "reference"})


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
