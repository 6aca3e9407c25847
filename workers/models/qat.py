"""Quantisation-aware training: linears that compute with rounded weights while their full ones
learn.

Rounding has no gradient, so the rounded weight's is taken for the full one's (straight-through
estimator, arXiv
1308.3432, section 4; arXiv 1712.05877). Knows modules; does not know plans or how weights are kept
afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.models.moe.experts import StackedLinear


def fake_quantise(decoder: nn.Module, kind: str = "int4", *, group: int = 128) -> None:
    """Every linear layer inside blocks, of routed experts too, multiplies by weights rounded as
    `kind` keeps them.

    int8: a scale an output; int4: a scale and a zero a group of inputs. Routers, norms, embeddings
    and the head are
    left alone; parameters stay as they are named, and are rounded at each use from what the module
    then holds: a cast
    copy, a gathered shard, this rank's part under tensor parallelism. Raises ValueError for another
    kind.
    """
    if kind not in ("int8", "int4"):
        raise ValueError(f"{kind!r} is not trained for; there are int8 and int4")
    for block in decoder.get_submodule("blocks").children():
        for module in block.modules():
            forward: Any = None
            if isinstance(module, nn.Linear):
                forward = partial(_linear, module, kind, group)
            elif isinstance(module, StackedLinear):
                forward = partial(_stacked, module, kind, group)
            if forward is not None:
                module.forward = forward


def rounded_like(weight: Tensor, kind: str, group: int) -> Tensor:
    """What the weight `[..., K]` is after rounding to `kind`, in its dtype: as
    `workers.inference.quantize` rounds.
    """
    wide, least = weight.float(), torch.finfo(torch.float32).tiny
    if kind == "int8":
        scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(least)
        return ((wide / scale).round().clamp(-127, 127) * scale).to(weight.dtype)
    inputs = weight.shape[-1]
    parts = functional.pad(wide, (0, -inputs % group))
    parts = parts.view(*parts.shape[:-1], -1, group)
    low, high = parts.amin(-1, keepdim=True).clamp_max(0), parts.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(least)
    zero = (-low / scale).round().clamp(0, 15)
    code = ((parts / scale).round() + zero).clamp(0, 15)
    return ((code - zero) * scale).flatten(-2)[..., :inputs].to(weight.dtype)


class _Rounded(torch.autograd.Function):
    """`x [..., K]` times the rounded `weight [N, K]` transposed, plus `bias [N]`.

    The weight is rounded once more for the input's gradient: a rounded copy of every weight, kept
    for each micro-batch
    under way, would be as large as the model.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, group: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = kind, group
        return functional.linear(x, rounded_like(weight, kind, group), bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = (flat @ rounded_like(weight, *ctx.how)).view_as(x)
        if ctx.needs_input_grad[1]:
            for_weight = flat.T @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            for_bias = flat.sum(0)
        return for_x, for_weight, for_bias, None, None


def _linear(module: nn.Linear, kind: str, group: int, x: Tensor) -> Tensor:
    found: Tensor = _Rounded.apply(x, module.weight, module.bias, kind, group)  # type: ignore[no-untyped-call]
    return found


def _stacked(module: StackedLinear, kind: str, group: int, pieces: list[Tensor]) -> list[Tensor]:
    biases = [None] * len(pieces) if module.bias is None else list(module.bias.unbind())
    triples = zip(pieces, module.weight.unbind(), biases, strict=True)
    return [_Rounded.apply(*each, kind, group) for each in triples]  # type: ignore[no-untyped-call]
