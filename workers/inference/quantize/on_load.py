"""Quantizes linears one at a time as weights are read, so at most one exists in full precision.

They are removed from a decoder before the rest is allocated, and restored from the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.inference.parallel.sharding import ShardedWeights
from workers.inference.quantize.replace_linears import (
    named_linears,
    quantize_weight,
    replace_module,
    replace_with_packed,
)
from workers.inference.quantize.tensor_parallel import check_shape
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.hf.quantized_formats import Packed
from workers.models.initialize import fill_parameter
from workers.models.moe.experts import StackedLinear
from workers.models.weights.reader import Weights, checked


@dataclass(slots=True)
class RemovedLinears:
    """Linears removed from `decoder`; none if its weights are not quantized."""

    decoder: Decoder
    weights: Weights | None
    kind: str | None
    group: int
    modules: list[tuple[str, nn.Linear | StackedLinear]]

    @torch.no_grad()
    def restore(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """Put the linears back, on `device`. Raises ValueError."""
        for name, module in self.modules:
            bias = (
                None
                if module.bias is None
                else self._read(f"{name}.bias", module.bias, seed).to(device, dtype)
            )
            packed = self._packed(f"{name}.weight")
            if packed is None and self.kind is None:
                weight = self._read(f"{name}.weight", module.weight, seed).to(device, dtype)
                replace_module(self.decoder, name, self._unquantized(module, weight, bias))
                continue
            if packed is None:
                packed = self._quantize(name, module, dtype, device, seed)
            where = self.weights.where if self.weights else ""
            for item in packed:
                check_shape(item, f"{name}.weight", module.weight.shape, where)
            replace_with_packed(self.decoder, name, module, packed, bias, dtype, device)

    def _packed(self, name: str) -> list[Packed] | None:
        if self.kind is not None:
            return None
        packed: list[Packed] | None = self.weights.packed(name)  # type: ignore[union-attr]
        return packed

    def _quantize(
        self,
        name: str,
        module: nn.Linear | StackedLinear,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> list[Packed]:
        """Quantize the full weight; a tensor-parallel rank keeps its shard afterwards."""
        assert self.kind is not None
        quantize = partial(
            quantize_weight, kind=self.kind, group=self.group, name=name, dtype=dtype, device=device
        )
        if isinstance(self.weights, ShardedWeights):
            return self.weights.quantize_shards(f"{name}.weight", quantize)
        return quantize(self._read(f"{name}.weight", module.weight, seed))

    def _read(self, name: str, parameter: Tensor, seed: int) -> Tensor:
        shape = tuple(parameter.shape)
        if self.weights is not None:
            return checked(self.weights.read(name), name, shape, self.weights.where)
        values = torch.empty(shape)
        fill_parameter(name, values, layers=self.decoder.spec.layers, seed=seed)
        return values

    def _unquantized(
        self, module: nn.Linear | StackedLinear, weight: Tensor, bias: Tensor | None
    ) -> nn.Module:
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return module


def remove_linears(decoder: Decoder, weights: Weights | None, kind: str | None) -> RemovedLinears:
    """Remove the linears of a decoder on `meta` that will be quantized.

    Raises WeightsError if `kind` is set and the weights are quantized already.
    """
    stored: Any = getattr(weights, "quantization", None)
    if stored is not None and kind is not None:
        raise WeightsError(
            f"{getattr(weights, 'where', '')}: its weights are already stored as {stored.form}; "
            "leave quantize out, or give the original weights"
        )
    group = group_for(linear_widths(decoder.spec))
    removed = list(named_linears(decoder)) if kind is not None or stored is not None else []
    for name, _ in removed:
        replace_module(decoder, name, nn.Identity())
    return RemovedLinears(decoder, weights, kind, group, removed)
