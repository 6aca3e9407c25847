"""The processes of a run: their device, process group and mesh. CPU with gloo and CUDA with NCCL by
the same code.

Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from workers.contracts.specs.plan import ParallelPlan
from workers.runtime.environment import Environment
from workers.runtime.exits import UserError
from workers.training.parallel.group_cache import once

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh: how many ranks lie along it, and which of them this one is."""

    name: str
    size: int = 1
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks along this axis that differ in nothing else; None means all ranks."""
        return None if self.mesh is None else self.mesh.get_group()


@dataclass(slots=True)
class World:
    """This process among all. One process alone has no process group and no axes.

    Axes: those of the plan, and `data` = dp x cp, over which gradients are reduced. `fsdp` is the
    mesh that
    `fully_shard` shards over (dp_shard x cp, and copies over dp_replicate), None where nothing is
    sharded.
    With expert parallelism `data` is ep x `expert_data`, the ranks that hold the same experts;
    `experts` is the mesh
    over which routed experts lie (ep, tp), and `expert_fsdp` what `fully_shard` shards them over.
    """

    rank: int
    size: int
    device: torch.device
    axes: dict[str, Axis] = field(default_factory=dict)
    fsdp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None

    def axis(self, name: str) -> Axis:
        return self.axes.get(name) or Axis(name)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def pick_device(environment: Environment) -> torch.device:
    """The local rank's GPU where any are visible, else the CPU.

    Raises UserError where GPUs do not suffice.
    """
    if torch.cuda.is_available():
        if environment.local_world_size > torch.cuda.device_count():
            found = (
                f"{environment.local_world_size} ranks on a node with "
                f"{torch.cuda.device_count()} visible GPUs"
            )
            raise UserError(
                f"plan: {found}; try as many as GPUs, or CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def start_world(environment: Environment, plan: ParallelPlan) -> World:
    """Join the process group that torchrun prepared (one that exists already is used) and lay out
    the mesh.
    """
    device = pick_device(environment)
    if environment.world_size == 1 and not plan.offloads_weights:
        return World(0, 1, device)
    on_cuda = device.type == "cuda"
    if not dist.is_initialized():
        join_group(
            alone=environment.world_size == 1,
            backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            timeout=timedelta(seconds=environment.timeout_s),
            device_id=device if on_cuda else None,
        )
    return lay_out(plan, World(environment.rank, environment.world_size, device))


def join_group(*, alone: bool, backend: str = "gloo", **more: Any) -> None:
    """The process group that torchrun prepared; a process `alone` gets a group of one, without a
    store to meet at.
    """
    from torch._C._distributed_c10d import HashStore

    own: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group(backend, **own, **more)


def lay_out(plan: ParallelPlan, world: World) -> World:
    """Give `world` the plan's axes, outer to inner pp, dp_replicate, dp_shard, cp, tp; experts have
    their own view.

    Every view of the ranks is unflattened from one mesh, so that parameters sharded over several
    agree on their root.
    Pure data parallelism without sharding needs no mesh: the whole process group is its.
    """
    sizes = axis_sizes(plan)
    place = coordinate(plan, world.rank)
    world.axes = {name: Axis(name, size, place[name]) for name, size in sizes.items() if size > 1}
    alike = plan.zero < 2 and plan.dp * plan.cp == world.size and plan.cp == plan.ep == 1
    # offloaded weights come to the device by `fully_shard`, to a single one too
    if (world.size == 1 or alike) and not plan.offloads_weights:
        return world
    from torch.distributed.device_mesh import init_device_mesh

    kind = world.device.type
    root = once(
        ("root", kind), lambda: init_device_mesh(kind, (world.size,), mesh_dim_names=("world",))
    )
    outer, inner = {"pp": plan.pp}, {"tp": plan.tp}
    for view in (
        {**outer, "dp": plan.dp, "cp": plan.cp, **inner},
        {**outer, "data": plan.dp * plan.cp, **inner},
    ):
        if world.size == 1:
            break
        mesh = _view(root, view)
        for name in mesh.mesh_dim_names or ():
            world.axes[name] = Axis(name, view[name], place[name], mesh[name])
    if plan.zero >= 2 or plan.offloads_weights:
        copies = plan.dp_replicate or 1
        dense = _view(
            root,
            {**outer, "dp_replicate": copies, "fsdp": plan.dp_shard * plan.cp, **inner},
            keep="fsdp",
        )
        world.fsdp = dense["dp_replicate", "fsdp"] if copies > 1 else dense["fsdp"]
    if plan.ep > 1:
        _lay_out_experts(root, plan, world)
    return world


def _lay_out_experts(root: DeviceMesh, plan: ParallelPlan, world: World) -> None:
    """Outer to inner pp, dp_replicate, efsdp, ep, tp: consecutive ranks of the data axis hold one
    set of experts.
    """
    place, sharded = coordinate(plan, world.rank), world.fsdp is not None
    copies = (plan.dp_replicate or 1) if sharded else 1
    alike = plan.dp * plan.cp // plan.ep
    sizes = {
        "pp": plan.pp,
        "dp_replicate": copies,
        "efsdp": alike // copies,
        "ep": plan.ep,
        "tp": plan.tp,
    }
    mesh = _view(root, sizes, keep="efsdp")
    world.experts = mesh["ep", "tp"] if plan.tp > 1 else mesh["ep"]
    world.axes["ep"] = Axis("ep", plan.ep, place["ep"], mesh["ep"])
    if sharded:
        world.expert_fsdp = mesh["dp_replicate", "efsdp"] if copies > 1 else mesh["efsdp"]
    else:
        world.axes["expert_data"] = Axis("expert_data", alike, place["expert_data"], mesh["efsdp"])


def axis_sizes(plan: ParallelPlan) -> dict[str, int]:
    """Every axis that a rank may ask its place on, composed ones included."""
    data = plan.dp * plan.cp
    experts = {"ep": plan.ep, "expert_data": data // plan.ep} if plan.ep > 1 else {}
    return {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp, "data": data, **experts}


def coordinate(plan: ParallelPlan, rank: int) -> dict[str, int]:
    """The place of a rank on every axis."""
    rest, tp = divmod(rank, plan.tp)
    rest, cp = divmod(rest, plan.cp)
    pp, dp = divmod(rest, plan.dp)
    expert_data, ep = divmod(dp * plan.cp + cp, plan.ep)
    return {
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "tp": tp,
        "data": dp * plan.cp + cp,
        "ep": ep,
        "expert_data": expert_data,
    }


def _view(root: DeviceMesh, sizes: dict[str, int], *, keep: str = "") -> DeviceMesh:
    """All ranks laid out by `sizes`, row by row; axes of one rank are left out but for `keep`."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name == keep}
    made = partial(root._unflatten, 0, tuple(kept.values()), tuple(kept))
    return once(("view", root.device_type, tuple(kept.items())), made)
