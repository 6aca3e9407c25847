"""Runs a step's micro-batches through a pipeline by one of torch's schedules.

The pipeline is flushed at the end of every step. Does not depend on the order of a schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from workers.training.data.rows import RowSource
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import matmul_context
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.pipeline.stage import Stage
from workers.training.parallel.pipeline.stage_layers import stages_on_rank
from workers.training.parallel.pipeline.stage_transfer import (
    boundary_tensors,
    pipeline_evaluate,
    pipeline_logits,
    with_reference,
)
from workers.training.parallel.pipeline.torch_schedules import build_schedule


class PipelineRunner:
    """A `MicrobatchRunner` over this rank's stages. Only the last stage's rank has losses."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        run, world, parallel = context.run, context.world, context.parallel
        axis = world.axis("pp")
        boundaries = [boundary_tensors(part, context) for part in parallel.parts]
        self.stages = [
            Stage(
                module,
                index=index,
                stages=run.plan.stages,
                boundary=boundary,
                group=axis.group,
                device=world.device,
                around=self._around,
                documents=lambda index: self._batches[self._offset + index].documents,
            )
            for module, boundary, index in zip(
                parallel.modules, boundaries, stages_on_rank(run.plan, axis.rank), strict=True
            )
        ]
        self.schedule, self.per_call = build_schedule(run.plan, self.stages, self._loss)
        self._batches: list[Batch] = []
        self._losses_done = 0
        self._offset = 0  # index in the step of the current call's first micro-batch
        self._total = torch.zeros((), dtype=torch.float64, device=world.device)
        self._factor = 1.0

    @property
    def holds_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return bool(self.stages[0].is_first)

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return bool(self.stages[-1].is_last)

    def forward_backward(self, first: int, factor: float) -> tuple[Tensor, float]:
        """See `MicrobatchRunner`."""
        context, plan = self.context, self.context.run.plan
        microbatches = context.microbatches(first, plan.global_batch_size)
        self._factor, self._losses_done = factor, 0
        self._total.zero_()
        started = time.perf_counter()
        with context.trace.time_breakdown.within("data"):
            batches = [context.load(context.samples, each) for each in microbatches]
        with matmul_context(plan.precision, context.world.device):
            batches = [with_reference(context, each) for each in batches]
        self._batches = batches
        data_s = time.perf_counter() - started
        timeline = context.trace.timeline
        if timeline is not None:
            timeline.begin()
        with (
            matmul_context(plan.precision, context.world.device),
            context.gradient_sync(last=False),
        ):
            for offset in range(0, len(batches), self.per_call):
                self._offset = offset
                some = batches[offset : offset + self.per_call]
                inputs = (torch.cat([each.inputs for each in some]),) if self.holds_first else ()
                targets = (
                    {"target": torch.cat([each.targets for each in some])}
                    if self.holds_last
                    else {}
                )
                self.schedule.step(*inputs, **targets, return_outputs=False)
        if timeline is not None:
            timeline.end()
        context.parallel.finish_gradients()
        return self._total * context.loss_share, data_s

    def evaluate(self, samples: RowSource, count: int, *, phase: str = "validation") -> Tensor:
        """See `MicrobatchRunner`."""
        return pipeline_evaluate(self.context, samples, count, phase=phase)

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """See `MicrobatchRunner`."""
        return pipeline_logits(self.context, tokens_BS, at)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Called on the last stage, for micro-batches in order."""
        loss = self.context.loss(logits, self._batches[self._losses_done])
        self._losses_done += 1
        self._total += loss.detach()
        if self.context.trace.timeline is not None:
            self.context.trace.timeline.extend_last_forward()
        return loss * self._factor

    @contextmanager
    def _around(self, kind: str, stage: int, index: int) -> Iterator[None]:
        context = self.context
        context.progress.enter("forward" if kind == "F" else "backward")
        if kind == "F":
            context.seed_dropout(self._batches[self._offset + index].microbatch)
        counting = context.memory.forward() if kind == "F" and index == 0 else nullcontext()
        with counting, context.trace.action(kind, stage, self._offset + index):
            yield
        context.trace.time_breakdown.enter("other")
