"""Control of load balancing in all routing layers of a model: loads, auxiliary losses, biases.

Does not depend on how a layer counts. Shapes: E experts, L routing layers.
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
    """Every routing layer of the model, None for those that are not in this rank's `parts`."""
    layers: dict[int, RoutedMlp] = {}
    for part in parts:
        for layer, block in part.blocks.items():
            if isinstance(block.mlp, RoutedMlp):
                layers[int(layer)] = block.mlp
    return [layers.get(layer) for layer in range(spec.layers) if spec.is_moe_layer(layer)]


class Balancer:
    """All routing layers of a model, in order of depth, for the training loop.

    `size` is the length of `take`: loads and the summed auxiliary loss, layer by layer.
    """

    def __init__(self, layers: Sequence[RoutedMlp | None], moe: Moe) -> None:
        """All routing layers of the model; None for another rank's."""
        self.moe = moe
        self.layers = [None if mlp is None else mlp.balance for mlp in layers]
        self.biases = [None if mlp is None else mlp.router.choice_bias for mlp in layers]
        self.size = len(self.layers) * (moe.experts + 1)

    def scale_gradients(self, scale: float) -> None:
        """Set the weight of one sequence's auxiliary loss in the next backward passes."""
        for layer in self.layers:
            if layer is not None:
                layer.gradient_scale = scale

    def take(self, device: torch.device) -> Tensor:
        """This rank's statistics since the last call, `[L · (E + 1)]` in fp64, to be summed."""
        empty = torch.zeros(self.moe.experts + 1, dtype=torch.float64, device=device)
        taken = [
            empty if layer is None or layer.recorded is None else layer.recorded
            for layer in self.layers
        ]
        for layer in self.layers:
            if layer is not None:
                layer.recorded = None
        return torch.cat(taken)

    @torch.no_grad()
    def update(self, statistics: list[float]) -> None:
        """Move each choice bias by `bias_update` toward even loads (arXiv 2408.15664, alg. 1)."""
        for bias, loads in zip(self.biases, self._loads(statistics), strict=True):
            if bias is None:
                continue
            bias += (self.moe.bias_update * torch.sign(loads.mean() - loads)).to(bias)

    def values(self, statistics: list[float], *, sequences: int) -> dict[str, float]:
        """Metrics of a step over `sequences`.

        Each expert's share of its layer's assignments times E (1 if even), their maximum minus 1
        (MaxVio, arXiv 2408.15664, eq. 4), and the auxiliary loss summed over layers. Layers are
        numbered from the first routing one. Models with more than MOST_LOADS experts (DeepSeek-V3
        has 14,848) have no metric per expert.
        """
        loads = self._loads(statistics)
        shares = (loads / loads.mean(1, keepdim=True)).tolist()
        named: dict[str, float] = {}
        if loads.numel() <= MOST_LOADS:
            named = {
                f"moe/load/{layer}/{e}": load
                for layer, row in enumerate(shares)
                for e, load in enumerate(row)
            }
        auxiliary = sum(statistics[self.moe.experts :: self.moe.experts + 1]) / sequences
        return {"moe/aux_loss": auxiliary, "moe/max_violation": max(map(max, shares)) - 1, **named}

    def _loads(self, statistics: list[float]) -> Tensor:
        return torch.tensor(statistics, dtype=torch.float64).view(len(self.layers), -1)[:, :-1]
