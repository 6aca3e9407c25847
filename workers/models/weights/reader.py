"""The interface of weights of any format, and loading them into a model, sharded or not.

Does not depend on file formats.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.initialise import local_part
from workers.models.weights.parameter_shapes import named_weights, weight_shapes


class Weights(Protocol):
    """Weights with the names of a Decoder of `spec`."""

    spec: ModelSpec
    where: str

    def read(self, name: str) -> Tensor:
        """The full tensor, as stored, on the CPU. Raises WeightsError."""
        ...


@torch.no_grad()
def fill_model(decoder: Decoder, weights: Weights) -> None:
    """Copy `weights` into the model: plain tensors or sharded DTensors, on any device.

    Every rank reads one full tensor at a time and copies its shard. Raises WeightsError.
    """
    stored = weight_shapes(weights.spec)
    for name, target in named_weights(decoder).items():
        local, place = local_part(target)
        if name not in stored and not target.requires_grad:
            local.zero_()  # a balancing bias that this training adds
            continue
        tensor = checked(weights.read(name), name, tuple(target.shape), weights.where)
        local.copy_(tensor[place])


def checked(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """`tensor` itself. Raises WeightsError if it does not have `shape`."""
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{where}: {name} has shape {list(tensor.shape)}, the configuration needs {list(shape)}"
        )
    return tensor
