"""What the parts of a training step share: model, data, optimizer, reporting and the loss.

A leaf of the loop: runners, reports and the loop take a `StepContext`; `setup.attempt` builds it
once. Does not depend on how micro-batches are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.metrics.recorder import Recorder
from workers.models.layers.documents import Documents
from workers.training.data.losses import SourceLosses
from workers.training.data.samples import Samples
from workers.training.loop.memory_metrics import MemoryMetrics
from workers.training.loop.objective import token_loss, token_losses
from workers.training.loop.progress import Progress
from workers.training.optim import EarlyGradientCopies
from workers.training.parallel.batch_sharding import Microbatch, load_microbatch, microbatches_for
from workers.training.parallel.context.apply import rank_positions, shard_sequence
from workers.training.parallel.mesh import World
from workers.training.parallel.parallelize import Parallel
from workers.training.setup.spec_loading import TrainingRun
from workers.training.trace.step_trace import Trace


class MicrobatchRunner(Protocol):
    """Runs a global batch through the model: one micro-batch after another, or as a pipeline."""

    def forward_backward(self, first: int, factor: float) -> tuple[Tensor, float]:
        """Run the global batch from sample `first`; leave reduced gradients on the parameters.

        The loss is multiplied by `factor` before the backward passes. Returns this rank's share of
        the summed token loss (fp64) and the seconds spent on data.
        """
        ...

    def evaluate(self, samples: Samples, count: int) -> Tensor:
        """`[2]` fp64: this rank's share of summed loss and of tokens of `count` samples."""
        ...

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """`{row: [vocab]}`: logits of row i at position `at[i]`, for rows that end on this rank.

        Every rank calls it with the same batch. Gathered weights stay for the next call.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """What one attempt's steps need on this rank.

    `source_losses` is set if the data has several sources. `loss_from_hidden`: the loss is computed
    from hidden states, without full logits.
    """

    run: TrainingRun
    world: World
    parallel: Parallel
    optimizer: Optimizer
    samples: Samples
    source_losses: SourceLosses | None
    memory: MemoryMetrics
    trace: Trace
    progress: Progress
    recorder: Recorder
    loss_from_hidden: bool

    def microbatches(self, first: int, count: int) -> list[Microbatch]:
        """This rank's micro-batches of `count` samples from `first` on."""
        plan, data = self.run.plan, self.world.axis("dp")
        return microbatches_for(
            first, count, micro_batch_size=plan.micro_batch_size, dp=data.size, rank=data.rank
        )

    def load(
        self, samples: Samples, microbatch: Microbatch
    ) -> tuple[Tensor, Tensor, Documents | None]:
        """Inputs and targets at this rank's positions, and the documents of the full sequences."""
        inputs, targets, documents = load_microbatch(samples, microbatch, self.world.device)
        return *shard_sequence(inputs, targets, self.world.axis("cp")), documents

    @property
    def positions(self) -> int:
        """Positions per sequence of the hidden states between this rank's blocks."""
        plan = self.run.plan
        return self.run.train.seq_len // plan.cp // (plan.tp if plan.sequence_parallel else 1)

    def seed_dropout(self, microbatch: Microbatch) -> None:
        """Select the dropout masks of the micro-batch that runs next."""
        self.parallel.dropout.sample = microbatch.first

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the passes of a micro-batch; gradients are reduced on the step's last one.

        An optimizer that copies gradients away during the backward pass needs to know if they are
        final when they appear.
        """
        if isinstance(self.optimizer, EarlyGradientCopies):
            self.optimizer.set_gradients_final(last and self.parallel.gradients_appear_reduced)
        return self.parallel.gradient_sync(last=last)

    def loss(self, logits: Tensor, targets: Tensor, microbatch: Microbatch | None) -> Tensor:
        """Summed token loss; the loss of a training `microbatch` is also added to its sources."""
        fused = self.run.train.fused_kernels
        if self.source_losses is None or microbatch is None:
            return token_loss(logits, targets, fused=fused)
        losses = token_losses(logits, targets, fused=fused)
        self.source_losses.add(microbatch, losses)
        return losses.sum()

    def model_loss(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        documents: Documents | None,
        microbatch: Microbatch | None,
    ) -> Tensor:
        """`loss` of a full model (no pipeline), with or without full logits in memory."""
        if not self.loss_from_hidden:
            return self.loss(module(inputs, documents), targets, microbatch)
        if self.source_losses is None or microbatch is None:
            return cast(Tensor, module(inputs, documents, targets))
        losses = module(inputs, documents, targets, True).sum(dim=1)
        self.source_losses.add(microbatch, losses)
        return cast(Tensor, losses.sum())

    def local_logits(self, logits: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """`MicrobatchRunner.logits` for the logits of this rank's positions."""
        axis = self.world.axis("cp")
        local = rank_positions(logits.shape[1] * axis.size, axis, torch.device("cpu")).tolist()
        rows = [row for row, position in enumerate(at) if position in local]
        columns = [local.index(at[row]) for row in rows]
        if rows and hasattr(logits, "to_local"):
            from workers.training.parallel.tensor.vocabulary import gather_logits

            return dict(zip(rows, gather_logits(logits, rows, columns), strict=True))
        return {row: logits[row, column] for row, column in zip(rows, columns, strict=True)}

    @property
    def loss_share(self) -> float:
        """This rank's weight in a sum of losses over all ranks: tensor-parallel ranks compute the
        same loss.
        """
        return 1.0 / self.run.plan.tp
