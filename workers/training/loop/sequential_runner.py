"""Runs micro-batches one after another through a full model (no pipeline).

Does not depend on optimizers' rules, metrics or the order of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from workers.training.data.samples import Samples
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
                inputs, targets, documents = context.load(context.samples, microbatch)
            data_s += time.perf_counter() - started
            with ExitStack() as stack:
                stack.enter_context(matmul_context(plan.precision, context.world.device))
                stack.enter_context(context.gradient_sync(last=index + 1 == len(microbatches)))
                context.progress.enter("forward")
                context.seed_dropout(microbatch)
                with context.memory.forward():
                    loss = context.model_loss(self.module, inputs, targets, documents, microbatch)
                context.progress.enter("backward")
                torch.autograd.backward(loss * factor)
                context.trace.time_breakdown.enter("other")
            total += loss.detach()
        context.parallel.finish_gradients()
        return total * context.loss_share, data_s

    def evaluate(self, samples: Samples, count: int) -> Tensor:
        """See `MicrobatchRunner`."""
        context = self.context
        total = torch.zeros(2, dtype=torch.float64, device=context.world.device)
        for microbatch in context.microbatches(0, count):
            context.progress.enter("validation")
            inputs, targets, documents = context.load(samples, microbatch)
            with matmul_context(context.run.plan.precision, context.world.device):
                total[0] += context.model_loss(self.module, inputs, targets, documents, None)
            total[1] += (targets >= 0).sum()
        context.parallel.release_gathered()
        return total * context.loss_share

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """See `MicrobatchRunner`."""
        context = self.context
        inputs, _ = shard_sequence(tokens_BS, tokens_BS, context.world.axis("cp"))
        with matmul_context(context.run.plan.precision, context.world.device):
            return context.local_logits(self.module(inputs), at)
