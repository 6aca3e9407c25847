"""Linears that are quantised as they are read, one at a time, so that there is never more than one
of them in full.

Taken out of a decoder before the rest of it is made, and put back from its weights. Knows weights
and layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.inference.parallel.sharding import Parts
from workers.inference.quantize.replace_linears import linears_of, packs_of, put, put_packed
from workers.inference.quantize.tensor_parallel import check_shape
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.hf.packed import Packed
from workers.models.initialise import fill_parameter
from workers.models.moe.experts import StackedLinear
from workers.models.weights.reader import Weights, checked


@dataclass(slots=True)
class Linears:
    """Those that are out of `decoder`, none where its weights stay whole."""

    decoder: Decoder
    weights: Weights | None
    kind: str | None
    group: int
    out: list[tuple[str, nn.Linear | StackedLinear]]

    @torch.no_grad()
    def put_back(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """On `device`. Raises ValueError."""
        for name, module in self.out:
            bias = (
                None
                if module.bias is None
                else self._read(f"{name}.bias", module.bias, seed).to(device, dtype)
            )
            packed = self._packed(f"{name}.weight")
            if packed is None and self.kind is None:
                weight = self._read(f"{name}.weight", module.weight, seed).to(device, dtype)
                put(self.decoder, name, self._whole(module, weight, bias))
                continue
            if packed is None:
                packed = self._rounded(name, module, dtype, device, seed)
            for each in packed:
                check_shape(
                    each,
                    f"{name}.weight",
                    module.weight.shape,
                    self.weights.where if self.weights else "",
                )
            put_packed(self.decoder, name, module, packed, bias, dtype, device)

    def _packed(self, name: str) -> list[Packed] | None:
        found: list[Packed] | None = None if self.kind is not None else self.weights.packed(name)  # type: ignore[union-attr]
        return found

    def _rounded(
        self,
        name: str,
        module: nn.Linear | StackedLinear,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> list[Packed]:
        """From the whole weight, of which a rank of several keeps its share afterwards."""
        assert self.kind is not None
        made = partial(
            packs_of, kind=self.kind, group=self.group, name=name, dtype=dtype, device=device
        )
        if isinstance(self.weights, Parts):
            return self.weights.rounded(f"{name}.weight", made)
        return made(self._read(f"{name}.weight", module.weight, seed))

    def _read(self, name: str, wanted: Tensor, seed: int) -> Tensor:
        if self.weights is not None:
            return checked(self.weights.read(name), name, tuple(wanted.shape), self.weights.where)
        made = torch.empty(wanted.shape)
        fill_parameter(name, made, layers=self.decoder.spec.layers, seed=seed)
        return made

    def _whole(
        self, module: nn.Linear | StackedLinear, weight: Tensor, bias: Tensor | None
    ) -> nn.Module:
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return module


def taken_out(decoder: Decoder, weights: Weights | None, kind: str | None) -> Linears:
    """Of a decoder on `meta`.

    Raises WeightsError where weights that are quantised already are to be quantised.
    """
    held: Any = getattr(weights, "quantization", None)
    if held is not None and kind is not None:
        message = f"its weights are kept as {held.form} already"
        raise WeightsError(
            f"{getattr(weights, 'where', '')}: {message}; leave quantize out, or give those before"
        )
    group = group_for(linear_widths(decoder.spec))
    out = list(linears_of(decoder)) if kind is not None or held is not None else []
    for name, _ in out:
        put(decoder, name, nn.Identity())
    return Linears(decoder, weights, kind, group, out)
