"""Names and shapes of a model's weights, without allocating them."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and persistent buffers (routers' balancing biases) by name."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    return {name: tuple(tensor.shape) for name, tensor in named_weights(decoder).items()}


def named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """The tensors by their names in an unwrapped model."""
    return {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
