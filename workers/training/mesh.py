"""The processes of a run: their device, process group and mesh. CPU with gloo and CUDA with NCCL by the same code.

Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from workers.contracts.plan import ParallelPlan
from workers.training.accept import mesh_axes
from workers.training.environment import Environment
from workers.training.exits import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True)
class World:
    """This process among all. One process alone has no process group and no mesh."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def pick_device(environment: Environment) -> torch.device:
    """The local rank's GPU where any are visible, else the CPU. Raises UserError where GPUs do not suffice."""
    if torch.cuda.is_available():
        if environment.local_world_size > torch.cuda.device_count():
            found = f"{environment.local_world_size} ranks on a node with {torch.cuda.device_count()} visible GPUs"
            raise UserError(f"plan: {found}; try as many as GPUs, or CUDA_VISIBLE_DEVICES= to run on the CPU")
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def start_world(environment: Environment, plan: ParallelPlan) -> World:
    """Join the process group that torchrun prepared (one that exists already is used) and lay out the mesh."""
    device = pick_device(environment)
    if environment.world_size == 1:
        return World(0, 1, device, None)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=environment.timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    return World(environment.rank, environment.world_size, device, build_mesh(plan, device.type))


def build_mesh(plan: ParallelPlan, device_type: str) -> DeviceMesh | None:
    """The data-parallel mesh; DDP-style stages need none, the whole process group is theirs."""
    if plan.zero < 2:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    axes = {name: size for name, size in mesh_axes(plan).items() if name == "dp_shard" or size > 1}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
