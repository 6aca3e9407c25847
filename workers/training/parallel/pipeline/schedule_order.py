"""The order of actions of each pipeline rank under a plan's schedule, without running it.

Does not depend on models.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import Schedule1F1B

from workers.contracts.specs.plan import ParallelPlan
from workers.training.parallel.pipeline.stage import Stage
from workers.training.parallel.pipeline.stage_layers import stages_on_rank
from workers.training.parallel.pipeline.torch_schedules import build_schedule


def order_of(plan: ParallelPlan) -> list[list[str]]:
    """Per pipeline rank, actions like `0F3` (stage 0, forward, micro-batch 3), B, I and W.

    I is the input gradient, W the weight gradient, an empty string a wait. Needs a process group of
    `pp` ranks, which may be a fake one.

    For PipeDream: one turn between flushes. Micro-batches count from those of its backward passes;
    forward passes are ahead by as many batches as stages follow.
    """
    if plan.schedule == "pipedream":
        count, last = plan.accumulation, plan.pp - 1
        return [
            [f"{s}F{(last - s) * count + n}" for n in range(count)]
            + [f"{s}B{n}" for n in range(count)]
            for s in range(plan.pp)
        ]
    schedule, per_call = build_schedule(plan, _empty_stages(plan), lambda logits, targets: logits)
    if isinstance(schedule, Schedule1F1B):
        return [_order_1f1b(stage, plan) for stage in range(plan.pp)]
    order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    assert order is not None
    offsets = [per_call * call for call in range(plan.accumulation // per_call)]
    return [
        [
            _name(action, offset)
            for offset in offsets
            for action in order[rank]
            if _has_microbatch(action)
        ]
        for rank in sorted(order)
    ]


def _order_1f1b(stage: int, plan: ParallelPlan) -> list[str]:
    """What 1F1B runs on a stage; torch 2.13 lists the last stage's forwards one too far."""
    count, warm = plan.accumulation, min(plan.accumulation, plan.pp - stage)
    order = [f"{stage}F{n}" for n in range(warm)]
    for n in range(count):
        order += [f"{stage}B{n}", *([f"{stage}F{warm + n}"] if warm + n < count else [])]
    return order


def _empty_stages(plan: ParallelPlan) -> list[Stage]:
    """Stages of pipeline rank 0 without parameters."""
    empty = torch.empty(0, device="meta")
    return [
        Stage(
            nn.Identity(),
            index=index,
            stages=plan.stages,
            boundary=(empty, empty),
            group=None,
            device=torch.device("cpu"),
            around=lambda *_: nullcontext(),
        )
        for index in stages_on_rank(plan, 0)
    ]


def _has_microbatch(action: Any) -> bool:
    """True for passes and waits; a stage's gradient reduction belongs to no micro-batch."""
    return action is None or action.sub_actions is not None or action.microbatch_index is not None


def _name(action: Any, offset: int) -> str:
    if action is None:
        return ""
    if action.sub_actions is not None:
        return "+".join(_name(each, offset) for each in action.sub_actions)
    return f"{action.stage_index}{action.computation_type.value}{offset + action.microbatch_index}"
