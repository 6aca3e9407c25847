"""The order in which each pipeline rank works, as torch's schedule of that name has it, without
running any.

Knows schedules; does not know models.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import Schedule1F1B

from workers.contracts.specs.plan import ParallelPlan
from workers.training.parallel.pipeline.stage import Stage
from workers.training.parallel.pipeline.stage_layers import stages_of
from workers.training.parallel.pipeline.torch_schedules import schedule_of


def order_of(plan: ParallelPlan) -> list[list[str]]:
    """By pipeline rank: actions like `0F3` (stage 0, forward, micro-batch 3), with B, I (input
    gradient) and W; an
    empty string is a wait. Needs a process group of `pp` ranks, which may be a fake one.

    Of PipeDream, which torch does not have, a turn between flushes: micro-batches count from those
    of its backward
    passes, forward passes are ahead by as many batches as stages come after.
    """
    if plan.schedule == "pipedream":
        count, last = plan.accumulation, plan.pp - 1
        return [
            [f"{s}F{(last - s) * count + n}" for n in range(count)]
            + [f"{s}B{n}" for n in range(count)]
            for s in range(plan.pp)
        ]
    schedule, at_once = schedule_of(plan, _bare_stages(plan), lambda logits, targets: logits)
    if isinstance(schedule, Schedule1F1B):
        return [_one_by_one(stage, plan) for stage in range(plan.pp)]
    order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    assert order is not None
    turns = [at_once * turn for turn in range(plan.accumulation // at_once)]
    return [
        [_name(action, first) for first in turns for action in order[rank] if _is_pass(action)]
        for rank in sorted(order)
    ]


def _one_by_one(stage: int, plan: ParallelPlan) -> list[str]:
    """What 1F1B does on a stage.

    Torch 2.13 runs it so, and lists the last stage's forward passes one too far.
    """
    count, warm = plan.accumulation, min(plan.accumulation, plan.pp - stage)
    found = [f"{stage}F{n}" for n in range(warm)]
    for n in range(count):
        found += [f"{stage}B{n}", *([f"{stage}F{warm + n}"] if warm + n < count else [])]
    return found


def _bare_stages(plan: ParallelPlan) -> list[Stage]:
    """Of pipeline rank 0, holding nothing."""
    nothing = torch.empty(0, device="meta")
    return [
        Stage(
            nn.Identity(),
            index=index,
            stages=plan.stages,
            ends=(nothing, nothing),
            group=None,
            device=torch.device("cpu"),
            around=lambda *_: nullcontext(),
        )
        for index in stages_of(plan, 0)
    ]


def _is_pass(action: Any) -> bool:
    """Or a wait: a stage's reductions of its gradients are of no micro-batch."""
    return action is None or action.sub_actions is not None or action.microbatch_index is not None


def _name(action: Any, first: int) -> str:
    if action is None:
        return ""
    if action.sub_actions is not None:
        return "+".join(_name(each, first) for each in action.sub_actions)
    return f"{action.stage_index}{action.computation_type.value}{first + action.microbatch_index}"
