"""Whole matrices for rules that need them: of n sharded ones each of n ranks gets one, works on it,
gives it back.

Two all-to-alls for every n tensors, and no work done twice (Muon for sharded models, as in arXiv
2502.16982, section
2.3). Knows shards; does not know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.optim.parameter_layout import Layout, layout_of

Compute = Callable[[Tensor], Tensor]


def on_whole(
    parameters: list[Tensor],
    parts: list[Tensor],
    compute: Compute,
    *,
    dtype: Callable[[torch.device], torch.dtype],
) -> list[Tensor]:
    """`compute` of each whole tensor; `parts` are this rank's parts, laid out as `parameters`, and
    so is the answer.

    Tensors travel and are computed with on the mesh's device, in `dtype` of that: offloaded ones
    too.
    """
    found: list[Tensor | None] = [None] * len(parts)
    shared: dict[Layout, list[int]] = {}
    for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
        layout = layout_of(parameter)
        if all(layout.placements[axis].dim < parameter.ndim - 2 for axis in layout.axes()):
            # whole, or a stack of matrices sharded between matrices
            device = torch.accelerator.current_accelerator(check_available=True) or part.device
            found[index] = compute(part.to(device, dtype(device)))
        elif _by_rows(layout):
            shared.setdefault(layout, []).append(index)
        else:
            found[index] = _gathered(
                parameter, part, compute, dtype(torch.device(layout.mesh.device_type))
            )
    for layout, indices in shared.items():
        [axis] = layout.axes()
        ranks = layout.mesh.size(axis)
        for first in range(0, len(indices), ranks):
            some = indices[first : first + ranks]
            shapes = [tuple(parameters[i].shape) for i in some]
            device = torch.device(layout.mesh.device_type)
            given = [parts[i].to(device, dtype(device)) for i in some]
            for i, result in zip(some, _dealt(layout, axis, shapes, given, compute), strict=True):
                found[i] = result
    return [each for each in found if each is not None]


def _by_rows(layout: Layout) -> bool:
    """Sharded over one mesh axis, by plain rows: what `fully_shard` does, hybrid or not."""
    from torch.distributed.tensor import Shard

    axes = layout.axes()
    # by type: a strided shard is a Shard whose rows lie otherwise
    return (
        len(axes) == 1
        and type(layout.placements[axes[0]]) is Shard
        and layout.placements[axes[0]].dim == 0
    )


def _dealt(
    layout: Layout, axis: int, shapes: list[tuple[int, ...]], parts: list[Tensor], compute: Compute
) -> list[Tensor]:
    """One round: tensor j goes to rank j of the axis, is computed there and comes back in rows."""
    group, ranks = layout.mesh.get_group(axis), layout.mesh.size(axis)
    here = layout.mesh.get_local_rank(axis)
    give = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    mine = shapes[here] if here < len(shapes) else (0,)
    take = [_rows(mine[0], ranks, rank) * _width(mine) for rank in range(ranks)]
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = sent.new_empty(sum(take))
    dist.all_to_all_single(got, sent, take, give, group=group)
    done = compute(got.view(mine)).reshape(-1) if here < len(shapes) else got
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, done.contiguous(), give, take, group=group)
    return [
        piece.view(part.shape) for piece, part in zip(torch.split(back, give), parts, strict=False)
    ]


def _gathered(parameter: Tensor, part: Tensor, compute: Compute, dtype: torch.dtype) -> Tensor:
    """Every rank computes the whole: for shardings over several axes or by columns."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded: Any = parameter
    mesh, placements = sharded.device_mesh, sharded.placements
    whole = DTensor.from_local(
        part.to(dtype),
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()
    return distribute_tensor(compute(whole), mesh, placements, src_data_rank=None).to_local()


def _rows(rows: int, ranks: int, rank: int) -> int:
    """Rows of a rank under torch.chunk's rule, which `Shard` follows."""
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


def _width(shape: tuple[int, ...]) -> int:
    width = 1
    for size in shape[1:]:
        width *= size
    return width
