"""Replaces the linears of a decoder's blocks by quantized ones.

Embeddings, norms, routers and the head keep the run's precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.contracts.specs.weight_rounding import group_for as group_for
from workers.inference.quantize.linears import QuantizedLinear, build_layer, pack_weight
from workers.models.decoder import Decoder
from workers.models.hf.quantized_formats import Packed
from workers.models.moe.experts import StackedLinear

KINDS = ("int8", "int4", "fp8")


class QuantizedExperts(nn.Module):
    """Replaces a `StackedLinear`: one quantized linear per expert."""

    def __init__(self, layers: list[QuantizedLinear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, chunks: list[Tensor]) -> list[Tensor]:
        """One chunk of tokens per expert."""
        return [layer(chunk) for layer, chunk in zip(self.layers, chunks, strict=True)]


def named_linears(decoder: Decoder) -> Iterator[tuple[str, nn.Linear | StackedLinear]]:
    """Linears of the blocks by name; the head is not included, since a small model needs it."""
    for name, module in decoder.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear | StackedLinear):
            yield name, module


def linear_input_widths(decoder: Decoder) -> list[int]:
    """Number of inputs of each linear."""
    return [int(module.weight.shape[-1]) for _, module in named_linears(decoder)]


def replace_module(decoder: Decoder, name: str, module: nn.Module) -> None:
    """Set the submodule of that dotted name."""
    parent, _, last = name.rpartition(".")
    setattr(decoder.get_submodule(parent), last, module)


def quantize_decoder(decoder: Decoder, kind: str) -> None:
    """Round every linear of the blocks to the nearest, in place.

    Raises ValueError naming a linear that cannot be quantized.
    """
    group = group_for(linear_input_widths(decoder))
    for name, module in list(named_linears(decoder)):
        weight = module.weight.detach()
        dtype, device = weight.dtype, weight.device
        packs = quantize_weight(
            weight, kind=kind, group=group, name=name, dtype=dtype, device=device
        )
        replace_with_packed(decoder, name, module, packs, module.bias, dtype, device)


def replace_with_packed(
    decoder: Decoder,
    name: str,
    module: nn.Linear | StackedLinear,
    packs: list[Packed],
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace `module` by a layer of `packs`, one per stacked expert."""
    if not isinstance(module, StackedLinear):
        replace_module(decoder, name, build_layer(packs[0], bias, dtype, device))
        return
    biases = [None] * len(packs) if bias is None else list(bias.unbind())
    layers = [
        build_layer(packed, own, dtype, device) for packed, own in zip(packs, biases, strict=True)
    ]
    replace_module(decoder, name, QuantizedExperts(layers))


def quantize_weight(
    weight: Tensor, *, kind: str, group: int, name: str, dtype: torch.dtype, device: torch.device
) -> list[Packed]:
    """Round a linear's `weight [N, K]`, or stacked experts `[E, N, K]`, after a cast to `dtype`.

    Returns one per expert. Raises ValueError.
    """
    weight = weight.to(device, dtype)
    try:
        return [
            pack_weight(kind, matrix, group)
            for matrix in (weight.unbind() if weight.dim() == 3 else (weight,))
        ]
    except ValueError as error:
        raise ValueError(f"{name}.weight: {error}") from None


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of all parameters and buffers, each counted once."""
    tensors = {id(x): x.nbytes for x in (*decoder.parameters(), *decoder.buffers())}
    return sum(tensors.values())
