"""Input scales of AWQ and SmoothQuant, folded into the preceding norm or linear.

A scale multiplies a weight's column and divides its input, so the model computes the same and
rounds better. Does not depend on how weights are packed. Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.inference.quantize.calibrate import InputStats, Rounding
from workers.models.decoder import Block
from workers.models.layers.attention import Attention
from workers.models.layers.mlp import Mlp

GRID = 20


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """`by`, a norm or a linear's outputs, is divided by the scales; the columns of the linears
    named `onto` are multiplied.
    """

    by: nn.Module
    onto: tuple[str, ...]


def find_folds(block: Block) -> list[ScaleFold]:
    """Where scales fit in a dense block; from values to the attention output only if each query
    head has its own values.
    """
    folds = []
    attn, mlp = block.attn, block.mlp
    if isinstance(attn, Attention):
        folds.append(ScaleFold(block.attn_norm, ("attn.q", "attn.k", "attn.v")))
        if attn.v.out_features == attn.o.in_features:
            folds.append(ScaleFold(attn.v, ("attn.o",)))
    if isinstance(mlp, Mlp):
        gated = ("mlp.gate", "mlp.up") if mlp.gate is not None else ("mlp.up",)
        folds.append(ScaleFold(block.mlp_norm, gated))
        # a gated product is linear in `up`; a plain MLP's activation is not
        if mlp.gate is not None:
            folds.append(ScaleFold(mlp.up, ("mlp.down",)))
    return folds


def awq_scales(
    weights: Sequence[Tensor], inputs: InputStats, rounding: Rounding, *, grid: int = GRID
) -> tuple[Tensor, float, float, float]:
    """Scales `[K]`, their power, and the error with and without them (arXiv 2306.00978, equations 4
    and 5).

    scales = mean|x| ^ power, normalized around 1; of `grid` powers from 0 to 1, the one with the
    least output error.
    """
    mean = inputs.mean.clamp_min(1e-8)
    best: tuple[Tensor, float, float] | None = None
    plain = 0.0
    for step in range(grid):
        power = step / grid
        scales = mean**power
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4)
        error = sum(
            inputs.error(rounding(weight * scales) / scales - weight.float()) for weight in weights
        )
        plain = error if step == 0 else plain
        if best is None or error < best[2]:
            best = scales, power, error
    assert best is not None
    return (*best, plain)


def smooth_scales(weights: Sequence[Tensor], inputs: InputStats, *, power: float = 0.5) -> Tensor:
    """`[K]`: max|x| ^ power / max|w| ^ (1 - power) (arXiv 2211.10438, equation 4)."""
    widest = torch.stack([w.float().abs().amax(0) for w in weights]).amax(0).clamp_min(1e-5)
    scales = inputs.abs_max.clamp_min(1e-5) ** power / widest ** (1 - power)
    return (scales / scales.log().mean().exp()).clamp(1e-3, 1e3)


@torch.no_grad()
def fold(block: Block, target: ScaleFold, scales: Tensor, inputs: dict[str, InputStats]) -> None:
    """Apply scales in place, to the weights and to the statistics of the scaled inputs."""
    for name in target.onto:
        layer = block.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.weight.copy_((layer.weight.float() * scales).to(layer.weight.dtype))
    for stats in {id(inputs[name]): inputs[name] for name in target.onto}.values():
        stats.gram /= scales.unsqueeze(0) * scales.unsqueeze(1)
        stats.abs_sum /= scales
        stats.abs_max = stats.abs_max / scales
    by = target.by
    weight, bias = by.weight, getattr(by, "bias", None)
    assert isinstance(weight, Tensor)
    weight.copy_(
        (weight.float() / (scales if weight.dim() == 1 else scales.unsqueeze(1))).to(weight.dtype)
    )
    if isinstance(bias, Tensor):
        bias.copy_((bias.float() / scales).to(bias.dtype))
