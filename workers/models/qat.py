"""Quantization-aware training: linear layers that compute with rounded weights and train full ones.

Rounding has no gradient; the rounded weight's gradient is used for the full one (straight-through
estimator, arXiv 1308.3432, section 4; arXiv 1712.05877). Does not depend on plans or on how weights
are stored afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.models.linear_variants import replace_linears, variant_of
from workers.models.moe.experts import StackedLinear


def fake_quantize(decoder: nn.Module, kind: str = "int4", *, group: int = 128) -> None:
    """Make every linear layer inside blocks multiply by weights rounded to `kind`.

    int8: one scale per output; int4: one scale and one zero per group of inputs. Weights are
    rounded at each use from what the module then holds: a cast copy, a gathered shard, this rank's
    shard under tensor parallelism. Raises ValueError for another kind.
    """
    if kind not in ("int8", "int4"):
        raise ValueError(f"quantization-aware training has no kind {kind!r}. Use int8 or int4.")
    replace_linears(
        decoder,
        lambda linear: variant_of(linear, QuantizationAwareLinear, kind=kind, group=group),
        lambda linear: variant_of(linear, QuantizationAwareStackedLinear, kind=kind, group=group),
    )


class QuantizationAwareLinear(nn.Linear):
    """A linear layer with fake-quantized weights."""

    kind: str
    group: int

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` → `[..., N]`."""
        out: Tensor = _Rounded.apply(input, self.weight, self.bias, self.kind, self.group)  # type: ignore[no-untyped-call]
        return out


class QuantizationAwareStackedLinear(StackedLinear):
    """One linear layer per expert, with fake-quantized weights."""

    kind: str
    group: int

    def forward(self, pieces: list[Tensor]) -> list[Tensor]:
        """See `StackedLinear.forward`."""
        biases = [None] * len(pieces) if self.bias is None else list(self.bias.unbind())
        triples = zip(pieces, self.weight.unbind(), biases, strict=True)
        return [_Rounded.apply(*each, self.kind, self.group) for each in triples]  # type: ignore[no-untyped-call]


def fake_quantized(weight: Tensor, kind: str, group: int) -> Tensor:
    """The weight `[..., K]` rounded to `kind` as by `workers.inference.quantize`, in its dtype."""
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

    The weight is rounded again for the input's gradient: rounded copies stored for each micro-batch
    in flight would be as large as the model.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, group: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding = kind, group
        return functional.linear(x, fake_quantized(weight, kind, group), bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = (flat @ fake_quantized(weight, *ctx.rounding)).view_as(x)
        if ctx.needs_input_grad[1]:
            for_weight = flat.T @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            for_bias = flat.sum(0)
        return for_x, for_weight, for_bias, None, None
