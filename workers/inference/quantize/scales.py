"""Scales of inputs that a layer's norm, or the layer before it, takes over: AWQ's and
SmoothQuant's.

What multiplies a column of a weight divides the input that it meets, so the model computes the
same, and rounds better.
Knows a block's parts; does not know how weights are packed. Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.inference.quantize.calibrate import Inputs, Rounding
from workers.models.decoder import Block
from workers.models.layers.attention import Attention
from workers.models.layers.mlp import Mlp

GRID = 20


@dataclass(frozen=True, slots=True)
class Fold:
    """`by`, a norm or the outputs of a linear, is divided by the scales; columns of `onto`, by
    name, multiplied.
    """

    by: nn.Module
    onto: tuple[str, ...]


def folds_of(block: Block) -> list[Fold]:
    """Where scales can go in a dense block; of values to the attention's output only where each
    head has its own.
    """
    found = []
    attn, mlp = block.attn, block.mlp
    if isinstance(attn, Attention):
        found.append(Fold(block.attn_norm, ("attn.q", "attn.k", "attn.v")))
        if attn.v.out_features == attn.o.in_features:
            found.append(Fold(attn.v, ("attn.o",)))
    if isinstance(mlp, Mlp):
        gated = ("mlp.gate", "mlp.up") if mlp.gate is not None else ("mlp.up",)
        found.append(Fold(block.mlp_norm, gated))
        # the product is linear in `up` alone; a plain MLP's activation is not
        if mlp.gate is not None:
            found.append(Fold(mlp.up, ("mlp.down",)))
    return found


def awq_scales(
    weights: Sequence[Tensor], inputs: Inputs, rounding: Rounding, *, grid: int = GRID
) -> tuple[Tensor, float, float, float]:
    """Scales `[K]`, their power, and the error with them and without (arXiv 2306.00978, equations 4
    and 5).

    scales = mean|x| ^ power, brought around 1, of the power among `grid` from 0 to 1 with the least error of outputs.
    """
    mean = inputs.mean.clamp_min(1e-8)
    best: tuple[Tensor, float, float] | None = None
    plain = 0.0
    for step in range(grid):
        power = step / grid
        scales = mean**power
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4)
        error = sum(
            inputs.error(rounding(each * scales) / scales - each.float()) for each in weights
        )
        plain = error if step == 0 else plain
        if best is None or error < best[2]:
            best = scales, power, error
    assert best is not None
    return (*best, plain)


def smooth_scales(weights: Sequence[Tensor], inputs: Inputs, *, power: float = 0.5) -> Tensor:
    """`[K]`: max|x| ^ power / max|w| ^ (1 - power) (arXiv 2211.10438, equation 4)."""
    widest = torch.stack([each.float().abs().amax(0) for each in weights]).amax(0).clamp_min(1e-5)
    scales = inputs.most.clamp_min(1e-5) ** power / widest ** (1 - power)
    return (scales / scales.log().mean().exp()).clamp(1e-3, 1e3)


@torch.no_grad()
def fold(block: Block, where: Fold, scales: Tensor, inputs: dict[str, Inputs]) -> None:
    """In place; the inputs are then those that the layers will see."""
    for name in where.onto:
        layer = block.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.weight.copy_((layer.weight.float() * scales).to(layer.weight.dtype))
    for seen in {id(inputs[name]): inputs[name] for name in where.onto}.values():
        seen.gram /= scales.unsqueeze(0) * scales.unsqueeze(1)
        seen.size /= scales
        seen.most = seen.most / scales
    by = where.by
    weight, bias = by.weight, getattr(by, "bias", None)
    assert isinstance(weight, Tensor)
    weight.copy_(
        (weight.float() / (scales if weight.dim() == 1 else scales.unsqueeze(1))).to(weight.dtype)
    )
    if isinstance(bias, Tensor):
        bias.copy_((bias.float() / scales).to(bias.dtype))
