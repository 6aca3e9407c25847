"""How a parameter lies over ranks, for update rules that keep state of another shape or need sums over whole tensors.

Knows DTensor placements; does not know update rules.
"""

from __future__ import annotations

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
            if placement.is_shard() and dim in (None, placement.dim)
        )

    def sums(self, values: Iterable[Tensor], axes: tuple[int, ...]) -> list[Tensor]:
        """Each tensor summed over the ranks along `axes`; all travel in one message an axis."""
        given = list(values)
        if not axes or not given:
            return given
        flat = torch.cat([value.reshape(-1) for value in given])
        for axis in axes:
            dist.all_reduce(flat, group=self.mesh.get_group(axis))
        parts = torch.split(flat, [value.numel() for value in given])
        return [part.view(value.shape) for part, value in zip(parts, given, strict=True)]


def layout_of(tensor: Tensor) -> Layout:
    sharded: Any = tensor
    return Layout(sharded.device_mesh, tuple(sharded.placements)) if hasattr(tensor, "to_local") else Layout()


def state_like(parameter: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """State of whole shape `shape`, of which this rank holds `local`, sharded as `parameter` is.

    Dimensions in which the state has size 1 and the parameter has not are whole on every rank. Such state is saved and
    resharded like the parameter itself.
    """
    layout = layout_of(parameter)
    if layout.mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        Replicate() if each.is_shard() and shape[each.dim] == 1 != parameter.shape[each.dim] else each
        for each in layout.placements
    ]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, layout.mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
