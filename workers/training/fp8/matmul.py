"""The three products of a linear layer over fp8 tiles: on Hopper's tensor cores, else emulated.

The emulation multiplies the same e4m3 values and scales in fp32, so it differs from the tensor
cores only in the order and rounding of sums: partial sums of 128 products have 24 bits here and
about 14 there. Does not depend on layers or gradients. Shapes: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from workers.training.fp8 import hopper
from workers.training.fp8.tiles import BLOCK, ROW, Tiles, quantize


def forward_product(x_MK: Tiles, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """`x · Wᵀ` `[M, N]`: x in tiles of 1 x 128; weights are quantized here in blocks of 128
    x 128.
    """
    out: Tensor = FORWARD(x_MK.codes, x_MK.scales, weight_NK, dtype)
    return out


def _forward(codes_MK: Tensor, scales: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    x_MK, blocks_NK = Tiles(codes_MK, scales, ROW), quantize(weight_NK, BLOCK)
    if hopper.usable(codes_MK.device):
        return hopper.product(x_MK, blocks_NK, dtype)
    return (x_MK.decoded() @ blocks_NK.decoded().t()).to(dtype)


def _shape(codes_MK: Tensor, scales: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    return codes_MK.new_empty((codes_MK.shape[0], weight_NK.shape[0]), dtype=dtype)


# A single operator with a 16-bit result, so that selective recomputation can save it. Not by
# torch.library.custom_op, which loads torch's compiler at the first call: seconds per process
_LIBRARY: Any = torch.library.Library("orrery", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "fp8_forward_product(Tensor codes, Tensor scales, Tensor weight, ScalarType dtype) -> Tensor"
)
_LIBRARY.impl("fp8_forward_product", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_forward_product", _shape, "Meta")
FORWARD = torch.ops.orrery.fp8_forward_product.default


@register_flop_formula(torch.ops.orrery.fp8_forward_product)
def _flops(codes_MK: list[int], scales: list[int], weight_NK: list[int], *_: Any, **__: Any) -> int:
    return 2 * codes_MK[0] * codes_MK[1] * weight_NK[0]


def input_gradient(gradient_MN: Tiles, weight_NK: Tiles, dtype: torch.dtype) -> Tensor:
    """`dY · W` `[M, K]`: dY in tiles of 1 x 128; blocks of W are also blocks of its transpose."""
    if hopper.usable(gradient_MN.codes.device):
        return hopper.product(gradient_MN, weight_NK.transposed(), dtype)
    return (gradient_MN.decoded() @ weight_NK.decoded()).to(dtype)


def weight_gradient(gradient_MN: Tiles, x_MK: Tiles, dtype: torch.dtype) -> Tensor:
    """`dYᵀ · x` `[N, K]`, a sum over tokens: both in tiles of 128 tokens x 1."""
    if hopper.usable(gradient_MN.codes.device):
        return hopper.product(gradient_MN.transposed(), x_MK.transposed(), dtype)
    return (gradient_MN.decoded().t() @ x_MK.decoded()).to(dtype)
