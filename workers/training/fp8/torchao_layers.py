"""fp8 linear layers of torchao: one scale per tensor or per row, traced by torch.compile.

Scales are computed from each tensor at its use, without history, so checkpoints contain none.
Torchao casts inputs, weights and gradients and multiplies by `torch._scaled_mm`, on a CPU too. Does
not depend on plans.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, cast

import torch
from torch import nn

from workers.models.linear_variants import replace_linears
from workers.models.moe.experts import StackedLinear
from workers.training.fp8 import hopper

# products of fp8 operands: Ada and Hopper or later
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16


def apply_torchao(decoder: nn.Module, recipe: str) -> None:
    """Make linear layers inside blocks multiply in fp8 with torchao's `recipe`.

    Layers with a width that is not a multiple of 16 stay: GPUs have no such fp8 products. Call it
    before blocks are compiled or sharded. Parameters keep their names.
    """
    loggers = logging.getLogger("torchao")
    level = loggers.level
    loggers.setLevel(logging.ERROR)  # it logs kernels of other devices that it cannot load
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    finally:
        loggers.setLevel(level)
    config = Float8LinearConfig.from_recipe_name(recipe)
    # weight gradients sum over tokens, whose number needs no multiple of 16 then
    object.__setattr__(config, "pad_inner_dim", True)

    def dense(linear: nn.Linear) -> nn.Linear:
        if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
            return linear
        return cast(nn.Linear, Float8Linear.from_float(linear, config=config))

    def stacked(linear: StackedLinear) -> StackedLinear:
        raise NotImplementedError("torchao's fp8 layers do not cover routed experts")

    replace_linears(decoder, dense, stacked)


def why_not(recipe: str, device: torch.device) -> tuple[str, str] | None:
    """Why this machine cannot train with a recipe, and what to do; None if it can.

    The block recipe is emulated on a CPU, for tests of its numbers; on a GPU emulation would be
    slower than bf16.
    """
    if recipe != "block" and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed", "Run pip install torchao, or use fp8_recipe block."
    if device.type != "cuda":
        return None
    capability: Any = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if recipe == "block" and not hopper.usable(device):
        message = (
            f"block-scaled products need compute capability 9.0 and CUDA 12.9; {name} has "
            f"{capability[0]}.{capability[1]} with CUDA {torch.version.cuda}"
        )
        other = "fp8_recipe tensorwise, or " if capability >= _LEAST_CAPABILITY else ""
        return message, f"Use {other}precision bf16."
    if capability < _LEAST_CAPABILITY or torch.version.hip is not None:
        message = f"{name} (compute capability {capability[0]}.{capability[1]}) has no fp8 products"
        return message, "Use precision bf16."
    return None
