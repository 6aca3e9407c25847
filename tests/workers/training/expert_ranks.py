"""What each rank of a pool does for the tests of expert parallelism; asked for by name."""

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


def laid(model: dict[str, Any], plan: dict[str, Any]) -> tuple[Decoder, Parallel]:
    given = ParallelPlan.from_dict(plan)
    world = build_axes(given, World(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    parallel = parallelize(ModelSpec.model_validate(model), given, world, seed=3)
    return parallel.parts[0].train(), parallel


def all_to_all_bytes(model: dict[str, Any], plan: dict[str, Any]) -> int:
    """Posted in a micro-batch of 2 x 12 tokens, forward and backward."""
    decoder, _ = laid(model, plan)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, decoder.spec.vocab, (2, 12), generator=generator)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        decoder(tokens).sum().backward()
    return counted(profiled.events(), group=1)["all_to_all"]


def unevenly_routed(model: dict[str, Any], plan: dict[str, Any], backend: str) -> dict[str, float]:
    """All tokens of all ranks to expert 0: the largest gradients of the first rank's and of the
    other experts, and how
    far outputs are from those of a layer that has all experts. `backend`: of kernels, where there
    is a choice.
    """
    os.environ["KERNELS_BACKEND"] = backend
    clear_records()
    try:
        return _unevenly_routed(model, plan)
    finally:
        del os.environ["KERNELS_BACKEND"]
        clear_records()


def _unevenly_routed(model: dict[str, Any], plan: dict[str, Any]) -> dict[str, float]:
    decoder, _ = laid(model, plan)
    whole = Decoder(decoder.spec)
    experts: dict[str, Experts] = {
        name: next(module for module in each.modules() if isinstance(module, Experts))
        for name, each in (("dealt", decoder), ("whole", whole))
    }
    for name, parameter in experts["whole"].named_parameters():
        lying: Any = dict(experts["dealt"].named_parameters())[name]
        parameter.data.copy_(lying.full_tensor())
    x = torch.randn(
        10, decoder.spec.hidden, generator=torch.Generator().manual_seed(7)
    ).requires_grad_()
    weights, chosen = torch.ones(10, 1), torch.zeros(10, 1, dtype=torch.int64)
    found, want = (experts[name](x, weights, chosen) for name in ("dealt", "whole"))
    found.sum().backward()
    gradients = [
        local_tensor(each.grad) for each in experts["dealt"].parameters() if each.grad is not None
    ]
    assert len(gradients) == len(list(experts["dealt"].parameters())), (
        "experts without a token have one too"
    )
    return {
        "apart": (found - want).abs().max().item(),
        "largest": max(each.abs().max().item() for each in gradients),
    }
