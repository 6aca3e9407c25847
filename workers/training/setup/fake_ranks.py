"""Describes a plan on many ranks from one process: fake process group, meta tensors, real sharding.

Does not train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.catalog.counts import parameter_count
from workers.models.decoder import Decoder
from workers.runtime.exit_codes import UserError
from workers.training.parallel.mesh import World, build_axes, rank_indices
from workers.training.parallel.pipeline.stage_layers import build_parts, stage_part, stages_on_rank
from workers.training.parallel.transforms import SHARDING, BuildContext, apply_transforms
from workers.training.setup.spec_loading import TrainingRun, mesh_axes


def describe_fake_ranks(run: TrainingRun, ranks: int) -> dict[str, Any]:
    """Mesh, stages and parameter bytes of every rank; raises UserError if the plan's world size is
    not `ranks`.
    """
    plan = run.plan
    if plan.world_size != ranks:
        raise UserError(
            f"plan: its world size is {plan.world_size}, --fake-ranks is {ranks}. Use dp {ranks}."
        )
    if ranks < 1:
        raise UserError(f"--fake-ranks {ranks} is not a number of ranks. Use 2 or more.")
    # ranks of a stage hold the same tensors: one process group per stage; each rank's indices give
    # its shards
    by_stage = {}
    for stage in range(plan.pp):
        with _fake_group(stage * (ranks // plan.pp), ranks) as world:
            build_axes(plan, world)
            with torch.device("meta"):
                parts = build_parts(run.model, plan, world.axis("pp"))
            parts = apply_transforms(parts, BuildContext(run.model, plan, world), names=SHARDING)
            by_stage[stage] = [
                _rank_bytes(parts, rank_indices(plan, rank))
                for rank in _ranks_of(stage, ranks, plan.pp)
            ]
            if stage == 0:
                indices = rank_indices(plan, 0)
                shards = {
                    n: list(_local_shape(p, indices))
                    for part in parts
                    for n, p in part.named_parameters()
                }
    return {
        "mesh": mesh_axes(plan),
        **(
            {"expert_mesh": {"expert_data": plan.dp * plan.cp // plan.ep, "ep": plan.ep}}
            if plan.ep > 1
            else {}
        ),
        "parameters": parameter_count(run.model).total,
        "ranks": [
            {
                "rank": rank,
                "coordinate": _coordinate(run, rank_indices(plan, rank)),
                "stages": stages_on_rank(plan, rank_indices(plan, rank)["pp"]),
                "parameter_bytes": by_stage[rank_indices(plan, rank)["pp"]][
                    rank % (ranks // plan.pp)
                ],
            }
            for rank in range(ranks)
        ],
        "rank_0_shards": shards,
        **_schedule(run),
    }


@contextmanager
def _fake_group(rank: int, ranks: int) -> Iterator[World]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield World(rank, ranks, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def _ranks_of(stage: int, ranks: int, pp: int) -> range:
    each = ranks // pp
    return range(stage * each, (stage + 1) * each)


def _rank_bytes(parts: list[Decoder], indices: dict[str, int]) -> int:
    """Parameter bytes of the rank with these indices."""
    return sum(_local_bytes(p, indices) for part in parts for p in part.parameters())


def _mesh_indices(mesh: Any, indices: dict[str, int]) -> list[int]:
    """A rank's indices on the axes of a parameter's mesh; `fsdp`, `efsdp` and `dp_replicate` are
    views of dp and cp.
    """
    names = mesh.mesh_dim_names
    shards = mesh["fsdp"].size() if "fsdp" in names else 1
    named = {**indices, "fsdp": indices["data"] % shards, "dp_replicate": indices["data"] // shards}
    if "efsdp" in names:
        copy, named["efsdp"] = divmod(indices["expert_data"], mesh["efsdp"].size())
        named["dp_replicate"] = copy
    return [named[name] for name in mesh.mesh_dim_names]


def _local_shape(parameter: Tensor, indices: dict[str, int]) -> tuple[int, ...]:
    if not hasattr(parameter, "to_local"):
        return tuple(parameter.shape)
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sharded: Any = parameter
    mesh = sharded.device_mesh
    shape, _ = _compute_local_shape_and_global_offset(
        sharded.shape, mesh.shape, _mesh_indices(mesh, indices), sharded.placements
    )
    return tuple(shape)


def _local_bytes(parameter: Tensor, indices: dict[str, int]) -> int:
    return math.prod(_local_shape(parameter, indices)) * parameter.element_size()


def _coordinate(run: TrainingRun, indices: dict[str, int]) -> list[int]:
    """The indices on the axes that `mesh` lists."""
    plan = run.plan
    named = {
        **indices,
        "dp_replicate": indices["dp"] // plan.dp_shard,
        "dp_shard": indices["dp"] % plan.dp_shard,
    }
    return [named[name] for name in mesh_axes(plan)]


def _schedule(run: TrainingRun) -> dict[str, Any]:
    """Layers of each stage, and each pipeline rank's actions in order."""
    plan = run.plan
    if plan.pp == 1:
        return {}
    from workers.training.parallel.pipeline.schedule_order import order_of

    with _fake_group(0, plan.pp):
        order = order_of(plan)
    layers = [list(stage_part(run.model, plan, stage).layers) for stage in range(plan.stages)]
    return {"stage_layers": layers, "schedule": order}
