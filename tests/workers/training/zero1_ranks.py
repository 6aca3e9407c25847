"""What ranks of a pool do for the tests of split optimizers and of reduced gradients; asked for by
name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from workers.contracts.specs.run_bodies import OptimizerSpec
from workers.training.optim import build_optimizer, get_optimizer_state
from workers.training.parallel.gradient_reduction import GradientReducer

# no width divides by 2
SHAPES = {
    "embed.weight": (31, 10),
    "blocks.0.a": (13, 10),
    "blocks.0.b": (10, 13),
    "blocks.0.norm": (13,),
    "z": (3, 1),
}
BY_COLUMNS = ("blocks.0.b",)


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def lay(name: str, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """As a tensor-parallel model has them: matrices sharded by rows or columns, vectors whole and
    plain.
    """
    if tensor.ndim < 2:
        return tensor.clone()
    return distribute_tensor(tensor, mesh, [Shard(1 if name in BY_COLUMNS else 0)])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def split_beside_tensor_parallel(rule: dict[str, Any]) -> dict[str, Any]:
    """Five updates of parameters dealt over dp, matrices sharded over tp; weights, and owners of
    each parameter.
    """
    mesh = mesh_2d()
    given = draw(0)
    parameters = {
        name: lay(name, each, mesh["tp"]).requires_grad_() for name, each in given.items()
    }
    group = mesh.get_group("dp")
    spec = OptimizerSpec.from_dict(rule)
    optimizer = build_optimizer(parameters, spec, shard_state=True, among=lambda _: group)
    for step in range(5):
        gradients = draw(10 + step)
        for name, parameter in parameters.items():
            parameter.grad = lay(name, gradients[name], mesh["tp"])
        optimizer.step()
    mine = [name for name, each in parameters.items() if each in get_optimizer_state(optimizer)]
    place = [int(mesh.get_local_rank("dp")), int(mesh.get_local_rank("tp"))]
    return {
        "place": place,
        "mine": mine,
        "weights": {name: whole(each).tolist() for name, each in parameters.items()},
    }


def reduced(bucket_bytes: int, sharded: bool, micro_batches: int, late: bool) -> dict[str, Any]:
    """Means over dp of gradients that a backward pass makes; each dp rank has its own inputs."""
    mesh = mesh_2d()
    parameters = {name: each.requires_grad_() for name, each in draw(0).items()}
    if sharded:
        parameters = {
            name: lay(name, each.detach(), mesh["tp"]).requires_grad_()
            for name, each in parameters.items()
        }
    dp = mesh.get_local_rank("dp")
    reducer = GradientReducer(
        parameters, mesh.get_group("dp"), average_over=2, bucket_bytes=bucket_bytes
    )
    launched = []
    for index in range(micro_batches):
        factors = draw(100 + 10 * index + dp)
        reducer.syncing = index + 1 == micro_batches and not late
        loss = torch.zeros(())
        for name, parameter in parameters.items():
            factor = lay(name, factors[name], mesh["tp"]) if sharded else factors[name]
            term = (parameter * factor).sum()
            loss = loss + (
                term.redistribute(placements=[Replicate()]).to_local()
                if sharded and parameter.ndim > 1
                else term
            )
        loss.backward()
        launched.append(sum(bucket.work is not None for bucket in reducer._buckets))
    reducer.finish()
    found = {name: whole(each.grad).tolist() for name, each in parameters.items()}
    return {"launched": launched, "buckets": len(reducer._buckets), "gradients": found}


def reduced_without(name: str) -> str:
    """What the reducer says when a parameter has no gradient, on every rank."""
    parameters = {each: torch.zeros(3, requires_grad=True) for each in ("a", "b", name)}
    reducer = GradientReducer(parameters, None, average_over=dist.get_world_size())
    (parameters["a"].sum() + parameters["b"].sum()).backward()
    try:
        reducer.finish()
    except RuntimeError as error:
        return str(error)
    return ""


def reduced_twice() -> str:
    parameters = {"a": torch.zeros(3, requires_grad=True)}
    reducer = GradientReducer(parameters, None, average_over=dist.get_world_size())
    reducer.syncing = True
    parameters["a"].sum().backward()
    try:
        parameters["a"].sum().backward()
    except RuntimeError as error:
        reducer.finish()
        return str(error)
    return ""


def torchs_partition() -> list[int]:
    """The rank to which ZeroRedundancyOptimizer gives each parameter."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [each.requires_grad_() for each in draw(0).values()]
    theirs = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return [theirs._param_to_rank[each] for each in parameters]
