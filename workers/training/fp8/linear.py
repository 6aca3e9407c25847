"""Linear layers whose forward, input-gradient and weight-gradient products are in fp8 (arXiv
2412.19437, section 3.3).

Forward and input gradient sum over features in tiles of 1 x 128, with weights in blocks of 128 x
128; the weight
gradient sums over tokens in tiles of 128 x 1. The layer's input is kept for it as fp8 already tiled
along tokens:
rounded once from what it was, where DeepSeek tiles its forward pass's fp8 anew. Knows modules; does
not know plans.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import kernels
from workers.models.layers.mlp import Mlp
from workers.models.layers.operations import Activation, KernelOperations
from workers.models.linear_variants import replace_linears, variant_of
from workers.models.moe.experts import StackedLinear
from workers.models.moe.layer import RoutedMlp
from workers.training.fp8.matmul import forward_product, input_gradient, weight_gradient
from workers.training.fp8.tiles import BLOCK, COLUMN, ROW, Tiles, quantize, without_kernels

_Made = tuple[Tensor, Tensor, Tensor]


def apply_fp8(decoder: nn.Module, *, handed_on: bool = True) -> None:
    """Make every linear layer inside blocks, of routed experts too, multiply in fp8.

    Norms and gates quantise their output in the same launch if a kernel can, and hand it on to the
    linears behind them (`handed_on`: not if it travels between ranks first).

    Routers, norms, embeddings and the head stay, as in DeepSeek-V3. Weights are quantised at each
    use from what the module then holds: a cast copy, a gathered shard, this rank's shard under
    tensor parallelism (tiles lie within a shard, whose ragged end is a smaller tile).
    """
    inputs = _Inputs()
    if handed_on:
        for block in decoder.get_submodule("blocks").children():
            round_what_is_made(block, inputs)
    replace_linears(
        decoder,
        lambda linear: variant_of(linear, Fp8Linear, inputs=inputs),
        lambda linear: variant_of(linear, Fp8StackedLinear, inputs=inputs),
    )


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8; `inputs` caches quantised inputs across layers."""

    inputs: _Inputs

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` → `[..., N]`."""
        out = multiply(input, self.weight, self.inputs)
        return out if self.bias is None else out + self.bias


class Fp8StackedLinear(StackedLinear):
    """One linear layer per expert, multiplied in fp8."""

    inputs: _Inputs

    def forward(self, pieces: list[Tensor]) -> list[Tensor]:
        """See `StackedLinear.forward`."""
        outs = [
            multiply(piece, weight, self.inputs)
            for piece, weight in zip(pieces, self.weight.unbind(), strict=True)
        ]
        if self.bias is None:
            return outs
        return [out + bias for out, bias in zip(outs, self.bias.unbind(), strict=True)]


def multiply(x: Tensor, weight: Tensor, inputs: _Inputs | None = None) -> Tensor:
    """`[..., K]` times `[N, K]` transposed → `[..., N]` in x's dtype; gradients in their tensors'
    own.
    """
    if x.numel() == 0:  # an expert without a token: zeros for its gradient
        return functional.linear(x, weight)
    out: Tensor = _Multiply.apply(x, weight, inputs or _Inputs(), torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return out


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inputs: _Inputs, kept: bool) -> Tensor:
        kept = kept and ctx.needs_input_grad[1]
        rows, columns = inputs.quantized(x, along_tokens=kept)
        ctx.weight_wanted = kept
        if columns is None:
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, columns.codes, columns.scales)
        out = forward_product(rows, weight, x.dtype)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *kept = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            for_x = input_gradient(quantize(flat, ROW), quantize(weight, BLOCK), gradient.dtype)
            for_x = for_x.view(*gradient.shape[:-1], weight.shape[1])
        if ctx.weight_wanted:
            for_weight = weight_gradient(
                quantize(flat, COLUMN), Tiles(kept[0], kept[1], COLUMN), weight.dtype
            )
        return for_x, for_weight, None, None


def round_what_is_made(block: nn.Module, inputs: _Inputs) -> None:
    """Norms before linears and gates inside MLPs tell `inputs` the tiles of what they give."""
    before = ("attn_norm",) if isinstance(block.mlp, RoutedMlp) else ("attn_norm", "mlp_norm")
    for name, module in block.named_modules():
        if (name in before or isinstance(module, Mlp)) and getattr(
            module, "operations", None
        ) is KernelOperations:
            module.operations = _rounding(inputs)


def _rounding(inputs: _Inputs) -> type[KernelOperations]:
    class Rounding(KernelOperations):
        """As `KernelOperations`; tiles come with the result where a kernel makes both at once, and nothing
        changes elsewhere.
        """

        @staticmethod
        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            if without_kernels(x) is not None:
                return KernelOperations.rms_norm(x, weight, eps)
            return inputs.made(
                *cast(_Made, kernels.rms_norm(x, weight, eps, quant="1x128", keep=True))
            )

        @staticmethod
        def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
            if activation is not functional.silu or without_kernels(gate) is not None:
                return KernelOperations.gated(gate, up, activation)
            return inputs.made(*cast(_Made, kernels.swiglu(gate, "1x128", up=up, keep=True)))

    return Rounding


class _Inputs:
    """The last input's tiles: projections that read one input (q, k, v; gate, up) quantise and keep
    it once.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rows: Tiles | None = None
        self._columns: Tiles | None = None

    def quantized(self, x: Tensor, *, along_tokens: bool) -> tuple[Tiles, Tiles | None]:
        """`x` `[..., K]` as a matrix in tiles along features, and along tokens where that is asked
        for.
        """
        flat = x.detach().reshape(-1, x.shape[-1])
        rows = self._rows
        if rows is None or self._of is None or self._of() is not x or self._version != x._version:
            rows = quantize(flat, ROW)
            self.made(x, rows.codes, rows.scales)
        if along_tokens and self._columns is None:
            self._columns = quantize(flat, COLUMN)
        return rows, self._columns if along_tokens else None

    def made(self, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """`x` `[..., K]`, whose tiles along features these are: codes like it, scales `[..., K /
        128]`.
        """
        self._rows = Tiles(codes.view(-1, codes.shape[-1]), scales.view(-1, scales.shape[-1]), ROW)
        self._columns = None
        # forgotten with the input, not one use later
        self._of, self._version = weakref.ref(x, self._forget), x._version
        return x

    def _forget(self, of: weakref.ref[Tensor]) -> None:
        if self._of is of:
            self._of = self._rows = self._columns = None
