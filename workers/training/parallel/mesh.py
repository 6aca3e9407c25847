"""The processes of a run: device, process group and mesh axes, for gloo on CPU and NCCL on CUDA.

Does not depend on models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from workers.contracts.specs.plan import ParallelPlan
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import UserError
from workers.training.parallel.group_cache import cached_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh: its size and this rank's index on it."""

    name: str
    size: int = 1
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on this axis only; None means all ranks."""
        return None if self.mesh is None else self.mesh.get_group()


@dataclass(slots=True)
class World:
    """This process and its mesh axes. A single process has no process group and no axes.

    Axes: those of the plan, and `data` = dp x cp, over which gradients are reduced. `fsdp` is the
    mesh that `fully_shard` shards over (dp_shard x cp, replicated over dp_replicate), None if
    nothing is sharded. With expert parallelism, `data` is ep x `expert_data` (the ranks that hold
    the same experts), `experts` the mesh of routed experts (ep, tp), and `expert_fsdp` the mesh
    that `fully_shard` shards them over.
    """

    rank: int
    size: int
    device: torch.device
    axes: dict[str, Axis] = field(default_factory=dict)
    fsdp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None

    def axis(self, name: str) -> Axis:
        """The axis `name`; an axis of size 1 if the plan has none."""
        return self.axes.get(name) or Axis(name)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def pick_device(environment: Environment) -> torch.device:
    """The local rank's GPU if any is visible, else the CPU.

    Raises UserError if there are fewer GPUs than ranks.
    """
    if torch.cuda.is_available():
        if environment.local_world_size > torch.cuda.device_count():
            message = (
                f"{environment.local_world_size} ranks on a node with "
                f"{torch.cuda.device_count()} visible GPUs"
            )
            raise UserError(
                f"plan: {message}. Use as many devices as GPUs, or set CUDA_VISIBLE_DEVICES= "
                "to run on the CPU."
            )
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def start_world(
    environment: Environment, plan: ParallelPlan, *, store: Store | None = None
) -> World:
    """Join torchrun's process group (an existing one is reused) and build the mesh axes.

    With `store` the group is made of the environment's ranks over it.
    """
    device = pick_device(environment)
    if environment.world_size == 1 and not plan.fully_shards:
        return World(0, 1, device)
    on_cuda = device.type == "cuda"
    if not dist.is_initialized():
        init_process_group(
            alone=environment.world_size == 1,
            backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            **_members(environment, store),
            timeout=timedelta(seconds=environment.timeout_s),
            device_id=device if on_cuda else None,
        )
    return build_axes(plan, World(environment.rank, environment.world_size, device))


def _members(environment: Environment, store: Store | None) -> dict[str, Any]:
    if store is None or environment.world_size == 1:
        return {}
    return {"store": store, "rank": environment.rank, "world_size": environment.world_size}


def init_process_group(*, alone: bool, backend: str = "gloo", **more: Any) -> None:
    """Join torchrun's process group; a process `alone` gets a group of one."""
    from torch._C._distributed_c10d import HashStore

    own: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group(backend, **own, **more)


def build_axes(plan: ParallelPlan, world: World) -> World:
    """Add the plan's axes to `world`: outer to inner pp, dp_replicate, dp_shard, cp, tp.

    Experts have their own view. Every view of the ranks is unflattened from one mesh, so parameters
    sharded over several have the same root. Pure data parallelism without sharding needs no mesh:
    it uses the whole process group.
    """
    sizes = axis_sizes(plan)
    index = rank_indices(plan, world.rank)
    world.axes = {name: Axis(name, size, index[name]) for name, size in sizes.items() if size > 1}
    plain_dp = plan.zero < 2 and plan.dp * plan.cp == world.size and plan.cp == plan.ep == 1
    if (world.size == 1 or plain_dp) and not plan.fully_shards:
        return world
    from torch.distributed.device_mesh import init_device_mesh

    kind = world.device.type
    root = cached_group(
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
            world.axes[name] = Axis(name, view[name], index[name], mesh[name])
    if plan.fully_shards:
        copies = plan.dp_replicate or 1
        dense = _view(
            root,
            {**outer, "dp_replicate": copies, "fsdp": plan.dp_shard * plan.cp, **inner},
            keep="fsdp",
        )
        world.fsdp = dense["dp_replicate", "fsdp"] if copies > 1 else dense["fsdp"]
    if plan.ep > 1:
        _build_expert_axes(root, plan, world)
    return world


def _build_expert_axes(root: DeviceMesh, plan: ParallelPlan, world: World) -> None:
    """Outer to inner pp, dp_replicate, efsdp, ep, tp: consecutive ranks of the data axis hold one
    set of experts.
    """
    index, sharded = rank_indices(plan, world.rank), world.fsdp is not None
    copies = (plan.dp_replicate or 1) if sharded else 1
    replicas = plan.dp * plan.cp // plan.ep
    sizes = {
        "pp": plan.pp,
        "dp_replicate": copies,
        "efsdp": replicas // copies,
        "ep": plan.ep,
        "tp": plan.tp,
    }
    mesh = _view(root, sizes, keep="efsdp")
    world.experts = mesh["ep", "tp"] if plan.tp > 1 else mesh["ep"]
    world.axes["ep"] = Axis("ep", plan.ep, index["ep"], mesh["ep"])
    if sharded:
        world.expert_fsdp = mesh["dp_replicate", "efsdp"] if copies > 1 else mesh["efsdp"]
    else:
        world.axes["expert_data"] = Axis(
            "expert_data", replicas, index["expert_data"], mesh["efsdp"]
        )


def axis_sizes(plan: ParallelPlan) -> dict[str, int]:
    """Sizes of all axes, composed ones included."""
    data = plan.dp * plan.cp
    experts = {"ep": plan.ep, "expert_data": data // plan.ep} if plan.ep > 1 else {}
    return {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp, "data": data, **experts}


def rank_indices(plan: ParallelPlan, rank: int) -> dict[str, int]:
    """The index of a rank on every axis."""
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


def extra_group(world: World, axis: str, purpose: str) -> Any:
    """Another process group over the ranks of an axis; collective over the world, cached."""
    size = world.axis(axis).size
    return cached_group((purpose, size), lambda: _new_group(world, axis))


def _new_group(world: World, axis: str) -> Any:
    mesh = world.axis(axis).mesh
    assert mesh is not None
    lines: list[Any] = [None] * world.size
    dist.all_gather_object(lines, mesh.mesh.flatten().tolist())
    own = None
    for line in sorted({tuple(each) for each in lines}):
        group = dist.new_group(list(line))
        own = group if world.rank in line else own
    return own


def _view(root: DeviceMesh, sizes: dict[str, int], *, keep: str = "") -> DeviceMesh:
    """All ranks as a mesh of `sizes`, row by row; axes of size 1 are dropped, except `keep`."""
    axes = {name: size for name, size in sizes.items() if size > 1 or name == keep}
    make = partial(root._unflatten, 0, tuple(axes.values()), tuple(axes))
    return cached_group(("view", root.device_type, tuple(axes.items())), make)
