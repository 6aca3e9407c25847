"""How a parameter is sharded over ranks, for rules with other state shapes or sums over full
tensors.

Does not depend on update rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Mesh and placements of a DTensor; both empty for a plain tensor."""

    mesh: Any = None
    placements: tuple[Any, ...] = ()

    def axes(self, dim: int | None = None) -> tuple[int, ...]:
        """Mesh axes over which tensor dimension `dim`, or any dimension, is sharded."""
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if is_sharded(placement) and dim in (None, placement.dim)
        )

    def sums(self, values: Iterable[Tensor], axes: tuple[int, ...]) -> list[Tensor]:
        """Each tensor summed over the ranks along `axes`, with one message per axis."""
        inputs = list(values)
        if not axes or not inputs:
            return inputs
        flat = torch.cat([value.reshape(-1) for value in inputs])
        # offloaded shards are sent from the mesh's device
        wire = flat.to(self.mesh.device_type)
        for axis in axes:
            dist.all_reduce(wire, group=self.mesh.get_group(axis))
        results = torch.split(wire.to(flat.device), [value.numel() for value in inputs])
        return [part.view(value.shape) for part, value in zip(results, inputs, strict=True)]


def is_sharded(placement: Any) -> bool:
    """Whether a placement shards.

    torch 2.13's `is_shard` is false for what `fully_shard` makes of a tensor-parallel shard.
    """
    return hasattr(placement, "dim")


def get_layout(tensor: Tensor) -> Layout:
    """The layout of a tensor over ranks."""
    sharded: Any = tensor
    return (
        Layout(sharded.device_mesh, tuple(sharded.placements))
        if hasattr(tensor, "to_local")
        else Layout()
    )


def shard_count(tensor: Tensor) -> int:
    """The number of different shards of a tensor; 1 for a plain one."""
    layout = get_layout(tensor)
    return math.prod(layout.mesh.size(axis) for axis in layout.axes())


def has_mesh_axis(tensor: Tensor, axis: str) -> bool:
    """Whether the mesh of a DTensor has an axis of that name."""
    mesh = get_layout(tensor).mesh
    return mesh is not None and axis in (mesh.mesh_dim_names or ())


def state_like(parameter: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """State with the full shape `shape`, of which this rank holds `local`, sharded like
    `parameter`.

    Dimensions of size 1 in the state but not in the parameter are replicated. Such state is saved
    and resharded like the parameter.
    """
    layout = get_layout(parameter)
    if layout.mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placements = [
        Replicate()
        if is_sharded(each) and shape[each.dim] == 1 != parameter.shape[each.dim]
        else each
        for each in layout.placements
    ]
    strides = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        layout.mesh,
        tuple(placements),
        tensor_meta=TensorMeta(torch.Size(shape), strides, local.dtype),
    )
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def data_owner(tensor: Tensor) -> Tensor:
    """The plain tensor that owns `tensor`'s memory: assigning its `data` replaces that memory."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def wrap_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like `like` whose local shard is `local`, on any device.

    `DTensor.from_local` would move it to the mesh's device; `fully_shard` builds offloaded
    parameters the same way.
    """
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    return DTensor(local, sharded._spec, requires_grad=False)  # type: ignore[no-untyped-call]
