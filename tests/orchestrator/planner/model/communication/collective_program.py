"""One step of a real parallel program on gloo, its collectives counted by torch's profiler.

Data and context parallelism are Orrery's own engine, over all ranks of the pool; tensor, pipeline
and expert
parallelism are torch's primitives, on groups of as many ranks as the plan wants, all of which do
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from workers.contracts import ModelSpec, ParallelPlan
from workers.contracts.specs.train import OptimizerSpec

Step = Callable[[], None]


def data_parallel(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> Step:
    from workers.training.optim import build_optimizer
    from workers.training.parallel.mesh import World, build_axes
    from workers.training.parallel.parallelize import parallelize

    world = build_axes(plan, World(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    parallel = parallelize(model, plan, world, seed=1)
    optimizer = build_optimizer(parallel.parameters(), OptimizerSpec(), shard_state=plan.zero == 1)

    def step() -> None:
        for index in range(plan.accumulation):
            last = index + 1 == plan.accumulation
            tokens = torch.randint(0, model.vocab, (plan.micro_batch_size, seq_len // plan.cp))
            with parallel.gradient_sync(last=last):
                parallel.modules[0](tokens).float().sum().backward()
        parallel.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Block(nn.Module):
    """The linears of a decoder block, attention and MLP in parallel paths one after the other."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.qkv, self.o = (
            nn.Linear(hidden, 3 * hidden, bias=False),
            nn.Linear(hidden, hidden, bias=False),
        )
        self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value = self.qkv(self.norm1(x))
        x = x + self.o(value[..., : value.shape[-1] // 3])
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def tensor_parallel(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> Step:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = groups_of(plan.tp)
    blocks = nn.ModuleList(Block(model.hidden, model.ffn) for _ in range(model.layers))
    split = Shard(1)
    for block in blocks:
        ways: dict[str, Any] = {
            "qkv": ColwiseParallel(),
            "o": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        if plan.sequence_parallel:
            columns = ColwiseParallel(input_layouts=split)
            rows = RowwiseParallel(output_layouts=split)
            ways = {"qkv": columns, "up": columns, "o": rows, "down": rows}
            ways |= dict.fromkeys(("norm1", "norm2"), SequenceParallel(use_local_output=True))
            whole = PrepareModuleInput(
                input_layouts=split, desired_input_layouts=split, use_local_output=True
            )
            parallelize_module(block, mesh, whole)
        else:
            parallelize_module(
                block,
                mesh,
                PrepareModuleInput(
                    input_layouts=Replicate(),
                    desired_input_layouts=Replicate(),
                    use_local_output=True,
                ),
            )
        parallelize_module(block, mesh, ways)
    length = seq_len // plan.tp if plan.sequence_parallel else seq_len

    def step() -> None:
        for _ in range(plan.accumulation):
            x = torch.randn(plan.micro_batch_size, length, model.hidden, requires_grad=True)
            for block in blocks:
                x = block(x)
            x.sum().backward()

    return step


def pipeline_parallel(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> Step:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
    )

    mesh = groups_of(plan.pp)
    rank, micro = mesh.get_local_rank(), plan.micro_batch_size
    stages = [
        PipelineStage(
            nn.Linear(model.hidden, model.hidden, bias=False),
            chunk * plan.pp + rank,
            plan.stages,
            torch.device("cpu"),
            group=mesh.get_group(),
        )
        for chunk in range(plan.virtual_stages)
    ]
    kind: Any = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved_1f1b": ScheduleInterleaved1F1B,
    }
    whole: Any = stages if plan.virtual_stages > 1 else stages[0]
    schedule = kind[plan.schedule](
        whole, n_microbatches=plan.accumulation, loss_fn=lambda out, target: out.sum()
    )
    batch = torch.randn(micro * plan.accumulation, seq_len, model.hidden)

    def step() -> None:
        first, last = rank == 0, rank == plan.pp - 1
        schedule.step(*([batch] if first else []), **({"target": batch} if last else {}))

    return step


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grads[0])
        dist.all_to_all_single(out, grads[0].contiguous(), group=context.group)
        return out, None


def expert_parallel(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> Step:
    """Balanced routing: every expert gets as many tokens, so that the exchange is the planner's."""
    assert model.moe is not None
    group = groups_of(plan.ep).get_group()
    copies = plan.micro_batch_size * seq_len * model.moe.top_k
    experts = nn.ModuleList(
        nn.Linear(model.hidden, model.hidden, bias=False) for _ in range(model.moe_layers)
    )
    counts = torch.full((model.moe.experts,), copies // model.moe.experts, dtype=torch.int32)

    def step() -> None:
        for _ in range(plan.accumulation):
            x = torch.randn(copies, model.hidden, requires_grad=True)
            for expert in experts:
                dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
                x = _Exchange.apply(expert(_Exchange.apply(x, group)), group)
            x.sum().backward()

    return step


def groups_of(size: int) -> DeviceMesh:
    """This rank's group of `size` neighbors."""
    return init_device_mesh(
        "cpu", (dist.get_world_size() // size, size), mesh_dim_names=("copies", "group")
    )["group"]


def counts(request_list: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Of each of the asked programs in turn, all on the same ranks."""
    return [_one(each) for each in request_list]


def _one(request_list: dict[str, Any]) -> dict[str, int]:
    model, plan = (
        ModelSpec.from_dict(request_list["model"]),
        ParallelPlan.from_dict(request_list["plan"]),
    )
    programs = {"tp": tensor_parallel, "pp": pipeline_parallel, "ep": expert_parallel}
    step = programs.get(request_list["axis"], data_parallel)(model, plan, request_list["seq_len"])
    step()  # DistributedDataParallel settles its buckets after the first backward pass
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    return counted(profiled, group=plan.tp if plan.tp > 1 else plan.dp_shard * plan.cp)


def counted(profiled: profile, *, group: int) -> dict[str, int]:
    """Bytes by kind, all tensors being fp32; all-gathers are over `group` ranks.

    Reads the recorded events: `profiled.events()` takes four times as long as the step to make
    objects of all of them, most of which are not collectives.
    """
    result = dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"), 0
    )
    recorded: Any = profiled.profiler
    for event in recorded.kineto_results.events():
        name = event.name()
        if not name.startswith(("c10d::", "_c10d_functional::", "gloo:")):
            continue
        size = [4 * math.prod(shape) for shape in event.shapes()]
        if name in ("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor"):
            # gloo does it by an all-reduce
            whole = size[1] if name.startswith("c10d") else size[0]
            result["reduce_scatter"] += whole
            result["all_reduce"] -= whole
        elif name == "c10d::alltoall_base_":
            result["all_to_all"] += size[1]
        elif name == "gloo:all_gather":
            result["all_gather"] += size[0] * group
        elif name in ("gloo:all_reduce", "gloo:broadcast", "gloo:send"):
            result[name[5:]] += size[0]
    return result
