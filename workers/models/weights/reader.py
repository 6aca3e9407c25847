"""Weights that exist, whatever form they lie in: their shape, and each tensor by our name.

Knows how they get into a model, sharded or whole. Does not know any file format.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.initialise import local_part
from workers.models.weights.parameter_shapes import weight_shapes, weights_of


class Weights(Protocol):
    """`read` gives one whole tensor, as stored, on the CPU; names are those of a Decoder of `spec`."""

    spec: ModelSpec
    where: str

    def read(self, name: str) -> Tensor: ...


@torch.no_grad()
def fill_model(decoder: Decoder, weights: Weights) -> None:
    """Copy `weights` into the model in place: plain tensors or DTensors sharded on any dim, on any
    device.

    Every rank reads for itself, one tensor at a time, and keeps what it holds. Raises WeightsError.
    """
    held = weight_shapes(weights.spec)
    for name, target in weights_of(decoder).items():
        local, place = local_part(target)
        if name not in held and not target.requires_grad:
            local.zero_()  # a balancing bias that begins with this training
            continue
        whole = checked(weights.read(name), name, tuple(target.shape), weights.where)
        local.copy_(whole[place])


def checked(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{where}: {name} has shape {list(tensor.shape)}, the configuration wants {list(shape)}"
        )
    return tensor
