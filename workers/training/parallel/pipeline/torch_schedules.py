"""Builds torch's pipeline schedule for a plan's schedule name.

Does not cover PipeDream, which updates between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import schedules

from workers.contracts.specs.plan import ParallelPlan
from workers.training.parallel.pipeline.stage import Stage

Loss = Callable[[Tensor, Tensor], Tensor]
_MULTI_STAGE = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zb1p": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def build_schedule(plan: ParallelPlan, stages: list[Stage], loss: Loss) -> tuple[Any, int]:
    """The schedule, and the number of micro-batches per call of its `step`.

    `naive` runs one micro-batch at a time through all stages. 1F1B with fewer micro-batches than
    stages has no steady phase: all forward passes come first, which is GPipe.
    """
    count = plan.accumulation
    kind = _MULTI_STAGE.get(plan.schedule)
    if kind is not None:
        return kind(list(stages), count, loss_fn=loss, scale_grads=False), count
    if plan.schedule == "naive":
        return schedules.ScheduleGPipe(stages[0], 1, loss_fn=loss, scale_grads=False), 1
    single = (
        schedules.Schedule1F1B
        if plan.schedule == "1f1b" and count >= plan.pp
        else schedules.ScheduleGPipe
    )
    return single(stages[0], count, loss_fn=loss, scale_grads=False), count
