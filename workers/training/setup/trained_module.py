"""What each trained module of an attempt needs: its optimizer, and recompute `auto`'s choice.

A run has one, PPO a second one. Does not depend on what a module learns.
"""

from __future__ import annotations

import os

import torch
from torch.optim import Optimizer

from workers.contracts.specs.train import OptimizerSpec
from workers.runtime.environment import Environment
from workers.training.offload.paged import UnifiedMemory, page_states
from workers.training.optim import build_optimizer
from workers.training.parallel.parallelize import Parallel
from workers.training.recompute.auto import RecomputeChoice, choose_recompute
from workers.training.recompute.memory_budget import OtherModule
from workers.training.setup.spec_loading import TrainingRun


def module_optimizer(
    run: TrainingRun,
    parallel: Parallel,
    environment: Environment,
    *,
    spec: OptimizerSpec | None = None,
) -> Optimizer:
    """The optimizer of the plan for `parallel`; `spec` replaces the run's. Collective."""
    world, parameters = parallel.world, parallel.parameters()
    optimizer = build_optimizer(
        parameters,
        spec or run.train.optimizer,
        shard_state=run.plan.zero == 1 and world.axis("data").size > 1,
        process_group=lambda parameter: parallel.replica_axis(parameter).group,
        offload=run.plan.offload,
        scratch=environment.scratch,
        host_threads=_host_threads(world.device, environment.local_world_size),
        fused=run.train.fused_kernels,
        seed=run.train.seed,
    )
    if run.train.optimizer.paged:
        # every rank takes part in the updates of the others' states
        page_states(optimizer, parameters.values(), UnifiedMemory(world.device))
    return optimizer


def module_recompute(
    run: TrainingRun,
    parallel: Parallel,
    environment: Environment,
    *,
    masked: bool,
    loss_from_hidden: bool = False,
    value_model: bool = False,
) -> RecomputeChoice | None:
    """Measure and choose for plan.recompute `auto`, else None. Collective.

    `value_model`: `parallel` is PPO's value model, which is built after the policy.
    """
    if run.plan.recompute != "auto":
        return None
    other: OtherModule = None
    if run.train.ppo is not None:
        other = "present" if value_model else "later"
    return choose_recompute(
        run,
        parallel,
        local_world_size=environment.local_world_size,
        masked=masked,
        loss_from_hidden=loss_from_hidden,
        other=other,
    )


def _host_threads(device: torch.device, local_world_size: int) -> int | None:
    """A rank's share of the host's cores if a GPU computes; None on a CPU."""
    if device.type == "cpu":
        return None
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)
