"""What the parts of a training step share: model, data, optimizer, reporting and the loss.

A leaf of the loop: runners, reports and the loop take a `StepContext`; `setup.loop_builder` builds
it once. Does not depend on how micro-batches are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.metrics.recorder import Recorder
from workers.models.decoder import Decoder
from workers.training.data.losses import SourceLosses
from workers.training.data.rows import MeasuredRows, RowSource
from workers.training.loop.memory_metrics import MemoryMetrics
from workers.training.loop.progress import Progress
from workers.training.objectives.counts import Counts
from workers.training.objectives.frozen_module import FrozenModule
from workers.training.objectives.objective import Objective, TokenObjective
from workers.training.objectives.token_losses import token_losses_at
from workers.training.optim import EarlyGradientCopies
from workers.training.parallel.batch_sharding import (
    IGNORED,
    Batch,
    Microbatch,
    Reference,
    TopTokens,
    load_microbatch,
    microbatches_for,
)
from workers.training.parallel.context.apply import rank_positions, shard_sequence
from workers.training.parallel.mesh import World
from workers.training.parallel.parallelize import Parallel
from workers.training.parallel.unpadded import Unpadding
from workers.training.setup.spec_loading import TrainingRun
from workers.training.trace.step_trace import Trace


class MicrobatchRunner(Protocol):
    """Runs a global batch through the model: one micro-batch after another, or as a pipeline."""

    def forward_backward(self, first: int, factor: float) -> tuple[Tensor, float]:
        """Run the global batch from sample `first`; leave reduced gradients on the parameters.

        The loss is multiplied by `factor` before the backward passes. Returns this rank's share of
        the summed loss (fp64) and the seconds spent on data.
        """
        ...

    def evaluate(self, samples: RowSource, count: int, *, phase: str = "validation") -> Tensor:
        """fp64: this rank's share of the summed loss and of the objective's metrics of `count`
        samples.
        """
        ...

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """`{row: [vocab]}`: logits of row i at position `at[i]`, for rows that end on this rank.

        Every rank calls it with the same batch. Gathered weights stay for the next call.
        """
        ...


@dataclass
class LogitsCount:
    """Positions of this rank whose logits were computed since the last `take`."""

    positions: int = 0

    def take(self) -> float:
        """The number; resets it."""
        taken, self.positions = float(self.positions), 0
        return taken


@dataclass(frozen=True)
class StepContext:
    """What one attempt's steps need on this rank.

    `source_losses` is set if the data has several sources. `loss_from_hidden`: token losses are
    computed from hidden states, without full logits. `frozen` is the reference or teacher.
    """

    run: TrainingRun
    world: World
    parallel: Parallel
    optimizer: Optimizer
    samples: RowSource
    objective: Objective
    counts: Counts
    source_losses: SourceLosses | None
    memory: MemoryMetrics
    trace: Trace
    progress: Progress
    recorder: Recorder
    loss_from_hidden: bool
    frozen: FrozenModule | None = None
    logits_count: LogitsCount = field(default_factory=LogitsCount)

    def microbatches(self, first: int, count: int) -> list[Microbatch]:
        """This rank's micro-batches of `count` samples from `first` on."""
        plan, data = self.run.plan, self.world.axis("dp")
        return microbatches_for(
            first, count, micro_batch_size=plan.micro_batch_size, dp=data.size, rank=data.rank
        )

    def load(self, samples: RowSource, microbatch: Microbatch) -> Batch:
        """The micro-batch at this rank's positions, with the documents of complete sequences."""
        batch, axis = load_microbatch(samples, microbatch, self.world.device), self.world.axis("cp")
        if isinstance(samples, MeasuredRows):
            numbers = range(microbatch.first, microbatch.first + microbatch.count)
            batch = self.unpadding.apply(batch, [samples.length(each) for each in numbers])
        if axis.size == 1:
            return batch
        weights = None if batch.weights is None else shard_sequence(batch.weights, axis)
        teacher = batch.reference
        if isinstance(teacher, TopTokens):
            shards = (shard_sequence(each, axis) for each in (teacher.tokens, teacher.logprobs))
            teacher = TopTokens(*shards)
        return replace(
            batch,
            reference=teacher,
            inputs=shard_sequence(batch.inputs, axis),
            targets=shard_sequence(batch.targets, axis),
            weights=weights,
            values={name: shard_sequence(each, axis) for name, each in batch.values.items()},
        )

    @cached_property
    def unpadding(self) -> Unpadding:
        """How micro-batches of rows with padding lose it."""
        run = self.run
        return Unpadding(run.plan, run.model, compiled=run.train.compile)

    def tokens(self, first: int) -> int:
        """Positions of the step whose global batch begins with sample `first`.

        Padding counts where it is computed.
        """
        samples, size = self.samples, self.run.plan.global_batch_size
        if not isinstance(samples, MeasuredRows) or not self.unpadding.works:
            return self.run.tokens_per_step
        return sum(samples.length(first + number) for number in range(size))

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

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the outputs of the frozen module, if there is one (no pipeline)."""
        if self.frozen is None or not self.objective.reads_reference:
            return batch
        return self.score_reference(batch)

    def score_reference(self, batch: Batch) -> Batch:
        """The batch with the outputs of the frozen module, which must exist."""
        assert self.frozen is not None
        [part] = self.frozen.parts
        with self.frozen.computing():
            if self.loss_from_hidden and isinstance(self.objective, TokenObjective):
                out: Reference = part(batch.inputs, batch.documents, batch.targets, True)
            elif (at := self._trained_positions(part, batch)) is not None:
                logits = part(batch.inputs, batch.documents, None, False, at)
                out = token_losses_at(logits, batch.targets, at, fused=self.objective.fused)
            else:
                out = self.objective.reference_of(part(batch.inputs, batch.documents), batch)
        return replace(batch, reference=out)

    def loss(self, logits: Tensor, batch: Batch, *, training: bool = True) -> Tensor:
        """The batch's summed loss, 0-dim; with `training` it is also added to its sources."""
        return self._sum(self.objective.from_logits(logits, batch), batch, training)

    def model_loss(self, module: nn.Module, batch: Batch, *, training: bool = True) -> Tensor:
        """`loss` of a full model (no pipeline), with or without full logits in memory."""
        objective = self.objective
        if not (self.loss_from_hidden and isinstance(objective, TokenObjective)):
            if (at := self._trained_positions(module, batch)) is not None:
                if training:
                    self.logits_count.positions += int((batch.targets != IGNORED).sum())
                logits = module(batch.inputs, batch.documents, None, False, at)
                losses = token_losses_at(logits, batch.targets, at, fused=objective.fused)
                weighted = cast(TokenObjective, objective).from_token_losses(losses, batch)
                return self._sum(weighted, batch, training)
            if training and self.selects_logits:  # all of them
                self.logits_count.positions += batch.targets.numel()
            return self.loss(module(batch.inputs, batch.documents), batch, training=training)
        inputs = (batch.inputs, batch.documents, batch.targets)
        adds_to_sources = training and self.source_losses is not None
        if objective.sums_tokens and batch.weights is None and not adds_to_sources:
            return cast(Tensor, module(*inputs))
        losses = objective.from_token_losses(module(*inputs, True), batch)
        return self._sum(losses, batch, training)

    @property
    def selects_logits(self) -> bool:
        """Whether logits are computed for targets with loss alone."""
        plan = self.run.plan
        return (
            self.world.device.type == "cpu"
            and isinstance(self.objective, TokenObjective)
            and not self.loss_from_hidden
            and plan.tp == plan.pp == 1
            and not self.run.train.compile
        )

    def _trained_positions(self, module: nn.Module, batch: Batch) -> Tensor | None:
        """The positions of a batch `[R]` whose targets have loss, if only their logits are needed.

        None if all have, on devices where their number would have to be waited for, and for other
        models.
        """
        targets = batch.targets
        if not self.selects_logits or not isinstance(module, Decoder):
            return None
        at = (targets != IGNORED).flatten().nonzero().squeeze(1)
        if len(at) == targets.numel():
            return None
        # one position at least: every rank runs the head, whose weight may be sharded
        return at if len(at) else at.new_zeros(1)

    def _sum(self, losses: Tensor, batch: Batch, training: bool) -> Tensor:
        """The sum of losses `[B]` or `[B, S]`."""
        if self.source_losses is None or not training:
            return losses.sum()
        by_row = losses.sum(dim=1) if losses.dim() > 1 else losses
        self.source_losses.add(batch.microbatch, by_row)
        return by_row.sum()

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

    def shares(self, loss: Tensor) -> Tensor:
        """This rank's share of a summed loss and of the objective's metrics, which it resets."""
        metrics = self.objective.take(self.world.device)
        return torch.cat([loss.reshape(1), metrics]) * self.loss_share

    @property
    def loss_share(self) -> float:
        """This rank's weight in a sum of losses over all ranks: tensor-parallel ranks compute the
        same loss, and so do context-parallel ranks under some objectives.
        """
        return 1.0 / (self.run.plan.tp * self.objective.repeated)
