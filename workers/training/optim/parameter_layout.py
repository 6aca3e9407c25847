"""How a parameter lies over ranks, for update rules that keep state of another shape or need sums
over whole tensors.

Knows DTensor placements; does not know update rules.
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
    """Mesh and placements of a DTensor; both empty for a plain tensor, which this rank holds whole."""

    mesh: Any = None
    placements: tuple[Any, ...] = ()

    def axes(self, dim: int | None = None) -> tuple[int, ...]:
        """Mesh axes over which tensor dimension `dim`, or any, is sharded."""
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if is_cut(placement) and dim in (None, placement.dim)
        )

    def sums(self, values: Iterable[Tensor], axes: tuple[int, ...]) -> list[Tensor]:
        """Each tensor summed over the ranks along `axes`; all travel in one message an axis."""
        given = list(values)
        if not axes or not given:
            return given
        flat = torch.cat([value.reshape(-1) for value in given])
        # offloaded shards travel from the device whose ranks they are of
        wire = flat.to(self.mesh.device_type)
        for axis in axes:
            dist.all_reduce(wire, group=self.mesh.get_group(axis))
        parts = torch.split(wire.to(flat.device), [value.numel() for value in given])
        return [part.view(value.shape) for part, value in zip(parts, given, strict=True)]


def is_cut(placement: Any) -> bool:
    """Whether it shards.

    What `fully_shard` makes of a tensor-parallel shard is no Shard to torch 2.13's `is_shard`.
    """
    return hasattr(placement, "dim")


def layout_of(tensor: Tensor) -> Layout:
    sharded: Any = tensor
    return (
        Layout(sharded.device_mesh, tuple(sharded.placements))
        if hasattr(tensor, "to_local")
        else Layout()
    )


def shards_of(tensor: Tensor) -> int:
    """Into how many different pieces a tensor is cut; 1 for a plain one."""
    layout = layout_of(tensor)
    return math.prod(layout.mesh.size(axis) for axis in layout.axes())


def lies_over(tensor: Tensor, axis: str) -> bool:
    """Whether the mesh of a DTensor has an axis of that name."""
    mesh = layout_of(tensor).mesh
    return mesh is not None and axis in (mesh.mesh_dim_names or ())


def state_like(parameter: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """State of whole shape `shape`, of which this rank holds `local`, sharded as `parameter` is.

    Dimensions in which the state has size 1 and the parameter has not are whole on every rank. Such
    state is saved and
    resharded like the parameter itself.
    """
    layout = layout_of(parameter)
    if layout.mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placements = [
        Replicate() if is_cut(each) and shape[each.dim] == 1 != parameter.shape[each.dim] else each
        for each in layout.placements
    ]
    strides = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        layout.mesh,
        tuple(placements),
        tensor_meta=TensorMeta(torch.Size(shape), strides, local.dtype),
    )
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def lender(tensor: Tensor) -> Tensor:
    """The plain tensor whose memory is `tensor`'s: setting its `data` gives `tensor` other memory."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor laid out over ranks as `like` is, of which this rank holds `local`, on whatever
    device that is.

    `DTensor.from_local` would move it to the mesh's device; `fully_shard` makes its offloaded
    parameters like this.
    """
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    return DTensor(local, sharded._spec, requires_grad=False)  # type: ignore[no-untyped-call]
