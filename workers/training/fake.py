"""A look at a plan on many ranks from one process: torch's fake process group, meta tensors, real sharding.

Does not train.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.decoder import Decoder
from workers.training.accept import TrainingRun, mesh_axes
from workers.training.exits import UserError
from workers.training.mesh import build_mesh
from workers.training.parallelize import shard


def describe_fake_ranks(run: TrainingRun, ranks: int) -> dict[str, Any]:
    """Mesh and local parameters of every rank; raises UserError when the plan's world size is not `ranks`."""
    plan = run.plan
    if plan.world_size != ranks:
        raise UserError(f"plan: its world size is {plan.world_size}, --fake-ranks says {ranks}; try dp {ranks}")
    if ranks < 1:
        raise UserError(f"--fake-ranks {ranks} is no number of ranks; try 2 or more")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with torch.device("meta"):
            decoder = Decoder(run.model)
        mesh = build_mesh(plan, "cpu") if ranks > 1 else None
        if mesh is not None:
            shard(decoder, plan, mesh)
        parameters = dict(decoder.named_parameters())
        coordinates = {rank: _coordinate(mesh, rank) for rank in range(ranks)}
        return {
            "mesh": mesh_axes(plan),
            "parameters": sum(math.prod(p.shape) for p in parameters.values()),
            "ranks": [
                {
                    "rank": rank,
                    "coordinate": coordinates[rank],
                    "parameter_bytes": sum(_local_bytes(p, coordinates[rank]) for p in parameters.values()),
                }
                for rank in range(ranks)
            ],
            "rank_0_shards": {name: list(_local_shape(p, coordinates[0])) for name, p in parameters.items()},
        }
    finally:
        dist.destroy_process_group()


def _coordinate(mesh: Any, rank: int) -> list[int]:
    if mesh is None:
        return [rank]
    return [int(place) for place in (mesh.mesh == rank).nonzero()[0]]


def _local_shape(parameter: Tensor, coordinate: list[int]) -> tuple[int, ...]:
    if not hasattr(parameter, "to_local"):
        return tuple(parameter.shape)
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sharded: Any = parameter
    shape, _ = _compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh.shape, coordinate, sharded.placements
    )
    return tuple(shape)


def _local_bytes(parameter: Tensor, coordinate: list[int]) -> int:
    return math.prod(_local_shape(parameter, coordinate)) * parameter.element_size()
