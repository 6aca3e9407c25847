"""The training loop's handle on all routing layers of a model: their loads, their auxiliary losses,
their biases.

Does not know how a layer counts. Shapes: E experts, L routing layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec, Moe
from workers.models.decoder import Decoder
from workers.models.moe.layer import RoutedMlp

MOST_LOADS = 512


def routing_layers(parts: Iterable[Decoder], spec: ModelSpec) -> list[RoutedMlp | None]:
    """Every routing layer of the model, where one of this rank's `parts` of it holds it."""
    found: dict[int, RoutedMlp] = {}
    for part in parts:
        for layer, block in part.blocks.items():
            if isinstance(block.mlp, RoutedMlp):
                found[int(layer)] = block.mlp
    return [found.get(layer) for layer in range(spec.layers) if spec.is_moe_layer(layer)]


class Balancer:
    """The training loop's handle on all routing layers of a model, in order of depth.

    `told` is how many numbers `take` gives: each layer's loads and its summed auxiliary loss, one
    layer after another.
    """

    def __init__(self, layers: Sequence[RoutedMlp | None], moe: Moe) -> None:
        """All routing layers of the model; None counts nothing here, being another rank's."""
        self.moe = moe
        self.layers = [None if mlp is None else mlp.balance for mlp in layers]
        self.biases = [None if mlp is None else mlp.router.choice_bias for mlp in layers]
        self.told = len(self.layers) * (moe.experts + 1)

    def scale_gradients(self, scale: float) -> None:
        """What one sequence's auxiliary loss counts for in the gradients that the next backward
        passes leave.
        """
        for layer in self.layers:
            if layer is not None:
                layer.gradient_scale = scale

    def take(self, device: torch.device) -> Tensor:
        """`[L · (E + 1)]` in fp64 of what this rank did since the last call; summed over ranks,
        `values` reads it.
        """
        empty = torch.zeros(self.moe.experts + 1, dtype=torch.float64, device=device)
        taken = [
            empty if layer is None or layer.told is None else layer.told for layer in self.layers
        ]
        for layer in self.layers:
            if layer is not None:
                layer.told = None
        return torch.cat(taken)

    @torch.no_grad()
    def update(self, told: list[float]) -> None:
        """Move each choice bias by `bias_update` towards even loads (arXiv 2408.15664, algorithm
        1).
        """
        for bias, loads in zip(self.biases, self._loads(told), strict=True):
            if bias is None:
                continue
            bias += (self.moe.bias_update * torch.sign(loads.mean() - loads)).to(bias)

    def values(self, told: list[float], *, sequences: int) -> dict[str, float]:
        """Metrics of a step over `sequences`: each expert's share of its layer's assignments times
        E (1 when even),
        the largest of them minus 1 (MaxVio, arXiv 2408.15664, eq. 4), and the auxiliary loss summed
        over layers.

        Layers count from the first routing one. Of models with more than MOST_LOADS experts in all
        the loads are left
        out: a series for each of DeepSeek-V3's 14,848 would drown all others.
        """
        loads = self._loads(told)
        shares = (loads / loads.mean(1, keepdim=True)).tolist()
        named: dict[str, float] = {}
        if loads.numel() <= MOST_LOADS:
            named = {
                f"moe/load/{layer}/{e}": load
                for layer, row in enumerate(shares)
                for e, load in enumerate(row)
            }
        auxiliary = sum(told[self.moe.experts :: self.moe.experts + 1]) / sequences
        return {"moe/aux_loss": auxiliary, "moe/max_violation": max(map(max, shares)) - 1, **named}

    def _loads(self, told: list[float]) -> Tensor:
        return torch.tensor(told, dtype=torch.float64).view(len(self.layers), -1)[:, :-1]
