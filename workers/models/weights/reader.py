"""The interface of weights of any format, and loading them into a model, sharded or not.

Does not depend on file formats.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.linear import AdaptedLinear
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.initialize import local_part
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
        if name not in stored:
            if not target.requires_grad:
                local.zero_()  # a balancing bias that this training adds
            continue  # an adapter's, with its initial values
        if name == "head.weight" and decoder.spec.scalar_head and not weights.spec.scalar_head:
            continue  # of a new reward model
        tensor = checked(weights.read(name), name, tuple(target.shape), weights.where)
        local.copy_(tensor[place])
    if decoder.prompt is not None:
        decoder.prompt.take(weights.read("embed.weight"))
    for path, module in decoder.named_modules():
        if isinstance(module, AdaptedLinear) and module.depends_on_base:
            name = f"{path}.weight"
            module.take(checked(weights.read(name), name, stored[name], weights.where))


def checked(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """`tensor` itself. Raises WeightsError if it does not have `shape`."""
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{where}: {name} has shape {list(tensor.shape)}, the configuration needs {list(shape)}"
        )
    return tensor
