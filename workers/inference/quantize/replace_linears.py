"""Every linear of a decoder but its head, and quantised ones in their place, at once or as the
weights are read.

Embeddings, norms, routers and the head keep the run's precision. Knows names; how a weight is
rounded is `linears`'.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.contracts.specs.weight_rounding import group_for as group_for
from workers.inference.quantize.linears import QuantisedLinear, layer_of, packed_as
from workers.models.decoder import Decoder
from workers.models.hf.packed import Packed
from workers.models.moe.experts import StackedLinear

KINDS = ("int8", "int4", "fp8")


class QuantisedExperts(nn.Module):
    """In place of a `StackedLinear`: a quantised linear an expert."""

    def __init__(self, layers: list[QuantisedLinear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, pieces: list[Tensor]) -> list[Tensor]:
        return [layer(piece) for layer, piece in zip(self.layers, pieces, strict=True)]


def linears_of(decoder: Decoder) -> Iterator[tuple[str, nn.Linear | StackedLinear]]:
    """Those of the blocks, by name: the head is most of what a small model says, and is kept."""
    for name, module in decoder.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear | StackedLinear):
            yield name, module


def widths_of(decoder: Decoder) -> list[int]:
    return [int(module.weight.shape[-1]) for _, module in linears_of(decoder)]


def put(decoder: Decoder, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(decoder.get_submodule(parent), last, module)


def quantise(decoder: Decoder, kind: str) -> None:
    """Every linear of the blocks, by rounding to the nearest, in place.

    Raises ValueError naming one that cannot be.
    """
    group = group_for(widths_of(decoder))
    for name, module in list(linears_of(decoder)):
        weight = module.weight.detach()
        dtype, device = weight.dtype, weight.device
        packs = packs_of(weight, kind=kind, group=group, name=name, dtype=dtype, device=device)
        put_packed(decoder, name, module, packs, module.bias, dtype, device)


def put_packed(
    decoder: Decoder,
    name: str,
    module: nn.Linear | StackedLinear,
    packs: list[Packed],
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """What computes with `packs` in the place of `module`, of stacked experts one each."""
    if not isinstance(module, StackedLinear):
        put(decoder, name, layer_of(packs[0], bias, dtype, device))
        return
    biases = [None] * len(packs) if bias is None else list(bias.unbind())
    layers = [layer_of(each, own, dtype, device) for each, own in zip(packs, biases, strict=True)]
    put(decoder, name, QuantisedExperts(layers))


def packs_of(
    weight: Tensor, *, kind: str, group: int, name: str, dtype: torch.dtype, device: torch.device
) -> list[Packed]:
    """A linear's `weight [N, K]`, or that of stacked experts `[E, N, K]`, rounded as it is in
    `dtype`: one each. Raises
    ValueError."""
    weight = weight.to(device, dtype)
    try:
        return [
            packed_as(kind, each, group)
            for each in (weight.unbind() if weight.dim() == 3 else (weight,))
        ]
    except ValueError as error:
        raise ValueError(f"{name}.weight: {error}") from None


def weight_bytes(decoder: Decoder) -> int:
    """Of all parameters and buffers, each once."""
    tensors = {id(each): each.nbytes for each in (*decoder.parameters(), *decoder.buffers())}
    return sum(tensors.values())
