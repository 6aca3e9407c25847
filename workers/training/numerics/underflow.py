"""Gradient underflow per layer: the share of fp16 gradients that were rounded to zero.

The caller sums over ranks. Does not depend on models, only on parameter names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor
from workers.training.numerics.layer_names import layer_name, layer_of


def zeros_by_layer(parameters: dict[str, Tensor], layers: int) -> Tensor:
    """`[2 · layers]` fp64 on the gradients' device: zeros in this rank's gradients per block, then
    all elements per block.

    Embeddings are excluded: most of their rows are zero because no token used them.
    """
    zeros: list[list[Tensor]] = [[] for _ in range(layers)]
    counts = [0] * layers
    device = torch.device("cpu")
    for name, parameter in parameters.items():
        layer = layer_of(name)
        if layer is None or parameter.grad is None:
            continue
        gradient = local_tensor(parameter.grad)
        zeros[layer].append(gradient.numel() - torch.count_nonzero(gradient))
        counts[layer] += gradient.numel()
        device = gradient.device
    none = torch.zeros((), dtype=torch.float64, device=device)
    sums = [torch.stack(each).sum().double() if each else none for each in zeros]
    return torch.cat([torch.stack(sums), torch.tensor(counts, dtype=torch.float64, device=device)])


def underflow_metrics(sums: list[float]) -> dict[str, float]:
    """Metrics from `zeros_by_layer` summed over all ranks; replicas cancel in the ratio."""
    layers = len(sums) // 2
    return {
        f"grad_underflow/{layer_name(layer, layers)}": sums[layer] / sums[layers + layer]
        for layer in range(layers)
        if sums[layers + layer]
    }
