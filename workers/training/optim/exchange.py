"""Gathers full matrices for rules that need them: each of n ranks computes one of n sharded
matrices.

Two all-to-alls per n tensors and no duplicated work (Muon for sharded models, as in arXiv
2502.16982, section 2.3). Does not depend on what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.optim.parameter_layout import Layout, get_layout

Compute = Callable[[Tensor], Tensor]


def apply_to_full_matrices(
    parameters: list[Tensor],
    shards: list[Tensor],
    compute: Compute,
    *,
    dtype: Callable[[torch.device], torch.dtype],
) -> list[Tensor]:
    """`compute` of each full tensor; `shards` and the results are local shards of `parameters`.

    Tensors are sent and computed on the mesh's device in `dtype` of it, offloaded ones too.
    """
    results: list[Tensor | None] = [None] * len(shards)
    shared: dict[Layout, list[int]] = {}
    for index, (parameter, shard) in enumerate(zip(parameters, shards, strict=True)):
        layout = get_layout(parameter)
        if all(layout.placements[axis].dim < parameter.ndim - 2 for axis in layout.axes()):
            # full, or a stack of matrices sharded between matrices
            device = torch.accelerator.current_accelerator(check_available=True) or shard.device
            results[index] = compute(shard.to(device, dtype(device)))
        elif _by_rows(layout):
            shared.setdefault(layout, []).append(index)
        else:
            results[index] = _gathered(
                parameter, shard, compute, dtype(torch.device(layout.mesh.device_type))
            )
    for layout, members in shared.items():
        [axis] = layout.axes()
        ranks = layout.mesh.size(axis)
        for first in range(0, len(members), ranks):
            indices_of_round = members[first : first + ranks]
            shapes = [tuple(parameters[i].shape) for i in indices_of_round]
            device = torch.device(layout.mesh.device_type)
            inputs = [shards[i].to(device, dtype(device)) for i in indices_of_round]
            for i, result in zip(
                indices_of_round,
                _exchange_round(layout, axis, shapes, inputs, compute),
                strict=True,
            ):
                results[i] = result
    return [each for each in results if each is not None]


def _by_rows(layout: Layout) -> bool:
    """Whether plain rows are sharded over one mesh axis, as `fully_shard` does, hybrid or not."""
    from torch.distributed.tensor import Shard

    axes = layout.axes()
    # by type: a strided shard is a Shard with another row order
    return (
        len(axes) == 1
        and type(layout.placements[axes[0]]) is Shard
        and layout.placements[axes[0]].dim == 0
    )


def _exchange_round(
    layout: Layout, axis: int, shapes: list[tuple[int, ...]], shards: list[Tensor], compute: Compute
) -> list[Tensor]:
    """One round: tensor j goes to rank j of the axis, is computed there and returns in rows."""
    group, ranks = layout.mesh.get_group(axis), layout.mesh.size(axis)
    local_rank = layout.mesh.get_local_rank(axis)
    send_sizes = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
    shape = shapes[local_rank] if local_rank < len(shapes) else (0,)
    receive_sizes = [_rows(shape[0], ranks, rank) * _width(shape) for rank in range(ranks)]
    sent = torch.cat([shard.reshape(-1) for shard in shards])
    received = sent.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    computed = compute(received.view(shape)).reshape(-1) if local_rank < len(shapes) else received
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, computed.contiguous(), send_sizes, receive_sizes, group=group)
    return [
        returned_shard.view(shard.shape)
        for returned_shard, shard in zip(torch.split(returned, send_sizes), shards, strict=False)
    ]


def _gathered(parameter: Tensor, shard: Tensor, compute: Compute, dtype: torch.dtype) -> Tensor:
    """Every rank computes the full tensor: for shardings over several axes or by columns."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded: Any = parameter
    mesh, placements = sharded.device_mesh, sharded.placements
    whole = DTensor.from_local(
        shard.to(dtype),
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()
    return distribute_tensor(compute(whole), mesh, placements, src_data_rank=None).to_local()


def _rows(rows: int, ranks: int, rank: int) -> int:
    """Rows of a rank by the rule of torch.chunk, which `Shard` follows."""
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


def _width(shape: tuple[int, ...]) -> int:
    width = 1
    for size in shape[1:]:
        width *= size
    return width
