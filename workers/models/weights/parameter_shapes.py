"""What a model's weights are called and how large they are, without making them.

Knows the decoder's own names; does not know files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter and every buffer that belongs to the weights (routers' balancing biases), by
    name.
    """
    with torch.device("meta"):
        decoder = Decoder(spec)
    return {name: tuple(tensor.shape) for name, tensor in weights_of(decoder).items()}


def weights_of(decoder: Decoder) -> dict[str, Tensor]:
    """The tensors themselves, by the names they have in an unwrapped model, whatever the plan."""
    return {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
