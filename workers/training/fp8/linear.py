"""Linear layers with fp8 forward, input-gradient and weight-gradient products.

As in DeepSeek-V3 (arXiv 2412.19437, section 3.3): forward and input gradient sum over features in
tiles of 1 x 128, with weights in blocks of 128 x 128; the weight gradient sums over tokens in tiles
of 128 x 1. The layer's input is saved in fp8 tiled along tokens, rounded once from its original
values, while DeepSeek requantizes the fp8 of its forward pass. Does not depend on plans.
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
from workers.training.fp8.tiles import BLOCK, COLUMN, ROW, Tiles, quantize, why_no_kernel

_QuantizedOutput = tuple[Tensor, Tensor, Tensor]


def apply_fp8(decoder: nn.Module, *, fuse_quantization: bool = True) -> None:
    """Make every linear layer inside blocks, routed experts included, multiply in fp8.

    `fuse_quantization`: norms and gates quantize their output in the same kernel launch if possible
    and pass it to the next linears; false if the output is sent between ranks first.

    Routers, norms, embeddings and the head stay, as in DeepSeek-V3. Weights are quantized at each
    use from what the module then holds: a cast copy, a gathered shard, or a tensor-parallel shard
    (tiles do not cross shards; a ragged end is a smaller tile).
    """
    inputs = _Inputs()
    if fuse_quantization:
        for block in decoder.get_submodule("blocks").children():
            quantize_outputs(block, inputs)
    replace_linears(
        decoder,
        lambda linear: variant_of(linear, Fp8Linear, inputs=inputs),
        lambda linear: variant_of(linear, Fp8StackedLinear, inputs=inputs),
    )


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8; `inputs` caches quantized inputs across layers."""

    inputs: _Inputs

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` → `[..., N]`."""
        out = multiply(input, self.weight, self.inputs)
        return out if self.bias is None else out + self.bias


class Fp8StackedLinear(StackedLinear):
    """One linear layer per expert, multiplied in fp8."""

    inputs: _Inputs

    def forward(self, chunks: list[Tensor]) -> list[Tensor]:
        """See `StackedLinear.forward`."""
        outputs = [
            multiply(chunk, weight, self.inputs)
            for chunk, weight in zip(chunks, self.weight.unbind(), strict=True)
        ]
        if self.bias is None:
            return outputs
        return [out + bias for out, bias in zip(outputs, self.bias.unbind(), strict=True)]


def multiply(x: Tensor, weight: Tensor, inputs: _Inputs | None = None) -> Tensor:
    """`[..., K]` times `[N, K]` transposed → `[..., N]` in x's dtype; gradients in their tensors'
    dtypes.
    """
    if x.numel() == 0:  # an expert without tokens: its gradient is zero
        return functional.linear(x, weight)
    out: Tensor = _Multiply.apply(x, weight, inputs or _Inputs(), torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return out


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inputs: _Inputs, save_input: bool) -> Tensor:
        save_input = save_input and ctx.needs_input_grad[1]
        rows, columns = inputs.quantized(x, along_tokens=save_input)
        ctx.needs_weight_gradient = save_input
        if columns is None:
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, columns.codes, columns.scales)
        out = forward_product(rows, weight, x.dtype)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *input_tiles = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_gradient = input_gradient(
                quantize(flat, ROW), quantize(weight, BLOCK), gradient.dtype
            )
            x_gradient = x_gradient.view(*gradient.shape[:-1], weight.shape[1])
        if ctx.needs_weight_gradient:
            weight_grad = weight_gradient(
                quantize(flat, COLUMN), Tiles(input_tiles[0], input_tiles[1], COLUMN), weight.dtype
            )
        return x_gradient, weight_grad, None, None


def quantize_outputs(block: nn.Module, inputs: _Inputs) -> None:
    """Make norms before linears, and gates inside MLPs, store the tiles of their outputs in
    `inputs`.
    """
    norm_names = ("attn_norm",) if isinstance(block.mlp, RoutedMlp) else ("attn_norm", "mlp_norm")
    for name, module in block.named_modules():
        if (name in norm_names or isinstance(module, Mlp)) and getattr(
            module, "operations", None
        ) is KernelOperations:
            module.operations = _quantizing(inputs)


def _quantizing(inputs: _Inputs) -> type[KernelOperations]:
    class QuantizingOperations(KernelOperations):
        """`KernelOperations` that also store tiles if a kernel makes both at once."""

        @staticmethod
        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            if why_no_kernel(x) is not None:
                return KernelOperations.rms_norm(x, weight, eps)
            return inputs.store(
                *cast(_QuantizedOutput, kernels.rms_norm(x, weight, eps, quant="1x128", keep=True))
            )

        @staticmethod
        def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
            if activation is not functional.silu or why_no_kernel(gate) is not None:
                return KernelOperations.gated(gate, up, activation)
            return inputs.store(
                *cast(_QuantizedOutput, kernels.swiglu(gate, "1x128", up=up, keep=True))
            )

    return QuantizingOperations


class _Inputs:
    """The last input's tiles: projections of one input (q, k, v; gate, up) quantize it once."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rows: Tiles | None = None
        self._columns: Tiles | None = None

    def quantized(self, x: Tensor, *, along_tokens: bool) -> tuple[Tiles, Tiles | None]:
        """`x` `[..., K]` as a matrix in tiles along features, and along tokens if requested."""
        flat = x.detach().reshape(-1, x.shape[-1])
        rows = self._rows
        if (
            rows is None
            or self._source is None
            or self._source() is not x
            or self._version != x._version
        ):
            rows = quantize(flat, ROW)
            self.store(x, rows.codes, rows.scales)
        if along_tokens and self._columns is None:
            self._columns = quantize(flat, COLUMN)
        return rows, self._columns if along_tokens else None

    def store(self, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Cache the tiles of `x` `[..., K]` along features: codes like `x`, scales `[..., K /
        128]`.
        """
        self._rows = Tiles(codes.view(-1, codes.shape[-1]), scales.view(-1, scales.shape[-1]), ROW)
        self._columns = None
        # released with the input, not at the next use
        self._source, self._version = weakref.ref(x, self._forget), x._version
        return x

    def _forget(self, of: weakref.ref[Tensor]) -> None:
        if self._source is of:
            self._source = self._rows = self._columns = None
