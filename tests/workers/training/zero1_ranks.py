"""Functions that ranks of a pool run for the tests of ZeRO-1 optimizers and gradient reduction."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from workers.contracts.specs.train import OptimizerSpec
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


def shard_tensor(name: str, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Shard as a tensor-parallel model does: matrices by rows or columns; vectors stay plain."""
    if tensor.ndim < 2:
        return tensor.clone()
    return distribute_tensor(tensor, mesh, [Shard(1 if name in BY_COLUMNS else 0)])


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def update_with_tensor_parallel(rule: dict[str, Any]) -> dict[str, Any]:
    """Five updates with states sharded over dp and matrices over tp: this rank's mesh position, the
    parameters that it owns, and all weights.
    """
    mesh = mesh_2d()
    initial = draw(0)
    parameters = {
        name: shard_tensor(name, tensor, mesh["tp"]).requires_grad_()
        for name, tensor in initial.items()
    }
    group = mesh.get_group("dp")
    spec = OptimizerSpec.from_dict(rule)
    optimizer = build_optimizer(parameters, spec, shard_state=True, process_group=lambda _: group)
    for step in range(5):
        gradients = draw(10 + step)
        for name, parameter in parameters.items():
            parameter.grad = shard_tensor(name, gradients[name], mesh["tp"])
        optimizer.step()
    state = get_optimizer_state(optimizer)
    owned = [name for name, parameter in parameters.items() if parameter in state]
    position = [int(mesh.get_local_rank("dp")), int(mesh.get_local_rank("tp"))]
    return {
        "position": position,
        "owned": owned,
        "weights": {
            name: full_tensor(parameter).tolist() for name, parameter in parameters.items()
        },
    }


def reduce_gradients(
    bucket_bytes: int, sharded: bool, micro_batches: int, late: bool
) -> dict[str, Any]:
    """Means over dp of the gradients of a backward pass; each dp rank has its own inputs."""
    mesh = mesh_2d()
    parameters = {
        name: (shard_tensor(name, tensor, mesh["tp"]) if sharded else tensor).requires_grad_()
        for name, tensor in draw(0).items()
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
            factor = shard_tensor(name, factors[name], mesh["tp"]) if sharded else factors[name]
            term = (parameter * factor).sum()
            loss = loss + (
                term.redistribute(placements=[Replicate()]).to_local()
                if sharded and parameter.ndim > 1
                else term
            )
        loss.backward()
        launched.append(sum(bucket.work is not None for bucket in reducer._buckets))
    reducer.finish()
    means = {name: full_tensor(parameter.grad).tolist() for name, parameter in parameters.items()}
    return {"launched": launched, "buckets": len(reducer._buckets), "gradients": means}


def reduce_without_gradient(name: str) -> str:
    """The reducer's error if the parameter `name` has no gradient on any rank."""
    parameters = {key: torch.zeros(3, requires_grad=True) for key in ("a", "b", name)}
    reducer = GradientReducer(parameters, None, average_over=dist.get_world_size())
    (parameters["a"].sum() + parameters["b"].sum()).backward()
    try:
        reducer.finish()
    except RuntimeError as error:
        return str(error)
    return ""


def reduce_twice() -> str:
    """The reducer's error if a second backward pass changes a gradient that is being reduced."""
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


def torch_owners() -> list[int]:
    """The rank to which ZeroRedundancyOptimizer gives each parameter."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [tensor.requires_grad_() for tensor in draw(0).values()]
    torch_optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return [torch_optimizer._param_to_rank[parameter] for parameter in parameters]
