"""Functions that the ranks of a pool run for the tests of expert parallelism."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from kernels.dispatch import clear_records
from tests.orchestrator.planner.model.communication.collective_program import counted
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.metrics.memory import local_tensor
from workers.models.decoder import Decoder
from workers.models.moe.experts import Experts
from workers.training.parallel.mesh import World, build_axes
from workers.training.parallel.parallelize import Parallel, parallelize


def build_sharded_decoder(model: dict[str, Any], plan: dict[str, Any]) -> tuple[Decoder, Parallel]:
    parallel_plan = ParallelPlan.from_dict(plan)
    world = build_axes(
        parallel_plan, World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    )
    parallel = parallelize(ModelSpec.model_validate(model), parallel_plan, world, seed=3)
    return parallel.parts[0].train(), parallel


def all_to_all_bytes(model: dict[str, Any], plan: dict[str, Any]) -> int:
    """Bytes of all-to-all sends in forward and backward of a micro-batch of 2 x 12 tokens."""
    decoder, _ = build_sharded_decoder(model, plan)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, decoder.spec.vocab, (2, 12), generator=generator)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        decoder(tokens).sum().backward()
    return counted(profiled, group=1)["all_to_all"]


def unevenly_routed(model: dict[str, Any], plan: dict[str, Any], backend: str) -> dict[str, float]:
    """Route all tokens of all ranks to expert 0: the largest gradient of this rank's experts, and
    the difference of the output from a layer that holds all experts.

    `backend` selects the kernels.
    """
    os.environ["KERNELS_BACKEND"] = backend
    clear_records()
    try:
        return _unevenly_routed(model, plan)
    finally:
        del os.environ["KERNELS_BACKEND"]
        clear_records()


def _unevenly_routed(model: dict[str, Any], plan: dict[str, Any]) -> dict[str, float]:
    decoder, _ = build_sharded_decoder(model, plan)
    full = Decoder(decoder.spec)
    experts: dict[str, Experts] = {
        name: next(module for module in model.modules() if isinstance(module, Experts))
        for name, model in (("sharded", decoder), ("full", full))
    }
    for name, parameter in experts["full"].named_parameters():
        shard: Any = dict(experts["sharded"].named_parameters())[name]
        parameter.data.copy_(shard.full_tensor())
    x = torch.randn(
        10, decoder.spec.hidden, generator=torch.Generator().manual_seed(7)
    ).requires_grad_()
    weights, experts_of_tokens = torch.ones(10, 1), torch.zeros(10, 1, dtype=torch.int64)
    actual, expected = (
        experts[name](x, weights, experts_of_tokens) for name in ("sharded", "full")
    )
    actual.sum().backward()
    gradients = [
        local_tensor(parameter.grad)
        for parameter in experts["sharded"].parameters()
        if parameter.grad is not None
    ]
    assert len(gradients) == len(list(experts["sharded"].parameters())), (
        "experts without a token have a gradient too"
    )
    return {
        "difference": (actual - expected).abs().max().item(),
        "largest_gradient": max(gradient.abs().max().item() for gradient in gradients),
    }


def train_without_waiting(spec: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train with the exchange of a GPU: no tensor is read by the host while tokens travel."""
    from pathlib import Path

    from tests.workers.training.pool import _run
    from workers.training.parallel import expert

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    padded, tolist = expert.TokenExchange._padded, torch.Tensor.tolist
    calls = 0

    def counted_exchange(self: Any, *given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        torch.Tensor.tolist = _refuse  # type: ignore[assignment]
        try:
            return padded(self, *given)
        finally:
            torch.Tensor.tolist = tolist  # type: ignore[method-assign]

    avoids = expert._avoids_waiting
    expert._avoids_waiting = lambda device: True
    expert.TokenExchange._padded = counted_exchange  # type: ignore[method-assign]
    try:
        outcome = _run(spec, Path(directory), {name: os.environ[name] for name in names})
    finally:
        expert._avoids_waiting = avoids
        expert.TokenExchange._padded = padded  # type: ignore[method-assign]
    return {**outcome, "calls": calls}


def _refuse(*_: Any) -> Any:
    raise AssertionError("the host read a tensor in the exchange of tokens")
