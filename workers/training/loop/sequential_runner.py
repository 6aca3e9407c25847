"""Runs micro-batches one after another through a full model (no pipeline).

Does not depend on optimizers' rules, metrics or the order of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from workers.training.data.rows import RowSource
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import matmul_context
from workers.training.parallel.context.apply import shard_sequence


class SequentialRunner:
    """A `MicrobatchRunner`: each micro-batch forward and backward before the next."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        [self.module] = context.parallel.modules

    def forward_backward(self, first: int, factor: float) -> tuple[Tensor, float]:
        """See `MicrobatchRunner`."""
        context, plan = self.context, self.context.run.plan
        microbatches = context.microbatches(first, plan.global_batch_size)
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        data_s = 0.0
        for index, microbatch in enumerate(microbatches):
            started = time.perf_counter()
            with context.trace.time_breakdown.within("data"):
                batch = context.load(context.samples, microbatch)
            data_s += time.perf_counter() - started
            with ExitStack() as stack:
                stack.enter_context(matmul_context(plan.precision, context.world.device))
                stack.enter_context(context.gradient_sync(last=index + 1 == len(microbatches)))
                context.progress.enter("forward")
                batch = context.with_reference(batch)
                context.seed_dropout(microbatch)
                with context.memory.forward():
                    loss = context.model_loss(self.module, batch)
                context.progress.enter("backward")
                torch.autograd.backward(loss * factor)
                context.trace.time_breakdown.enter("other")
            total += loss.detach()
        context.parallel.finish_gradients()
        return total * context.loss_share, data_s

    def evaluate(self, samples: RowSource, count: int, *, phase: str = "validation") -> Tensor:
        """See `MicrobatchRunner`."""
        context = self.context
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        for microbatch in context.microbatches(0, count):
            context.progress.enter(phase)
            batch = context.load(samples, microbatch)
            with matmul_context(context.run.plan.precision, context.world.device):
                batch = context.with_reference(batch)
                total += context.model_loss(self.module, batch, training=False)
        context.parallel.release_gathered()
        return context.shares(total)

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """See `MicrobatchRunner`."""
        context = self.context
        inputs = shard_sequence(tokens_BS, context.world.axis("cp"))
        with matmul_context(context.run.plan.precision, context.world.device):
            return context.local_logits(self.module(inputs), at)
