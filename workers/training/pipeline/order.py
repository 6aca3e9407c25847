"""The order in which each pipeline rank works, as torch's schedule of that name has it, without running any.

Knows schedules; does not know models.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from workers.contracts.plan import ParallelPlan
from workers.training.pipeline.parts import stages_of
from workers.training.pipeline.schedules import schedule_of
from workers.training.pipeline.stage import Stage


def order_of(plan: ParallelPlan) -> list[list[str]]:
    """By pipeline rank: actions like `0F3` (stage 0, forward, micro-batch 3), with B, I (input gradient) and W; an
    empty string is a wait. Needs a process group of `pp` ranks, which may be a fake one."""
    schedule, at_once = schedule_of(plan, _bare_stages(plan), lambda logits, targets: logits)
    order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    assert order is not None
    turns = [at_once * turn for turn in range(plan.accumulation // at_once)]
    return [[_name(action, first) for first in turns for action in order[rank]] for rank in sorted(order)]


def _bare_stages(plan: ParallelPlan) -> list[Stage]:
    """Of pipeline rank 0, holding nothing."""
    nothing = torch.empty(0, device="meta")
    return [
        Stage(
            nn.Identity(), index=index, stages=plan.stages, ends=(nothing, nothing), group=None,
            device=torch.device("cpu"), around=lambda *_: nullcontext(),
        )
        for index in stages_of(plan, 0)
    ]  # fmt: skip


def _name(action: Any, first: int) -> str:
    if action is None:
        return ""
    if action.sub_actions is not None:
        return "+".join(_name(each, first) for each in action.sub_actions)
    return f"{action.stage_index}{action.computation_type.value}{first + action.microbatch_index}"
