"""How a step's micro-batches go through the model, forward and backward: one after another, or as a
pipeline.

Knows samples, parts and losses; does not know optimizers, metrics or steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from workers.models.layers.documents import Documents
from workers.training.data.losses import SourceLosses
from workers.training.data.samples import Samples
from workers.training.loop.memory_metrics import MemoryBook
from workers.training.loop.objective import token_loss, token_losses
from workers.training.numerics.precision import products
from workers.training.parallel.batch_sharding import Block, blocks_of, tensors_of
from workers.training.parallel.context.apply import cut, positions_of
from workers.training.parallel.mesh import World
from workers.training.parallel.parallelize import Parallel
from workers.training.setup.spec_loading import TrainingRun
from workers.training.trace.step_trace import Trace


@dataclass(slots=True)
class Setting:
    """What every way of going through the model needs. `tell` is told the phase, for reports."""

    run: TrainingRun
    world: World
    parallel: Parallel
    train: Samples
    memory: MemoryBook
    by_source: SourceLosses | None
    tell: Callable[[str], None]
    trace: Trace
    without_logits: bool = False

    def blocks(self, first: int, count: int) -> list[Block]:
        """This rank's micro-batches of `count` samples from `first` on."""
        plan, data = self.run.plan, self.world.axis("dp")
        return blocks_of(
            first, count, micro_batch_size=plan.micro_batch_size, dp=data.size, rank=data.rank
        )

    def tensors(self, samples: Samples, block: Block) -> tuple[Tensor, Tensor, Documents | None]:
        """Inputs and targets as this rank sees them, and the documents of the whole sequences."""
        inputs, targets, documents = tensors_of(samples, block, self.world.device)
        return *cut(inputs, targets, self.world.axis("cp")), documents

    @property
    def positions(self) -> int:
        """Positions of a sequence that go through this rank's parts between attention and
        attention.
        """
        plan = self.run.plan
        return self.run.train.seq_len // plan.cp // (plan.tp if plan.sequence_parallel else 1)

    def seed_dropout(self, block: Block) -> None:
        """The masks of the micro-batch that goes through the model next."""
        self.parallel.dropout.sample = block.first

    def loss(self, logits: Tensor, targets: Tensor, block: Block | None) -> Tensor:
        """Summed token loss; of a training `block` also told to its sources."""
        fused = self.run.train.fused_kernels
        if self.by_source is None or block is None:
            return token_loss(logits, targets, fused=fused)
        losses = token_losses(logits, targets, fused=fused)
        self.by_source.add(block, losses)
        return losses.sum()

    def loss_of(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        documents: Documents | None,
        block: Block | None,
    ) -> Tensor:
        """Summed token loss of a whole model, as `loss`; with its logits in memory or without
        (`without_logits`).
        """
        if not self.without_logits:
            return self.loss(module(inputs, documents), targets, block)
        if self.by_source is None or block is None:
            return cast(Tensor, module(inputs, documents, targets))
        losses = module(inputs, documents, targets, True).sum(dim=1)
        self.by_source.add(block, losses)
        return cast(Tensor, losses.sum())

    def held_logits(self, logits: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """What `Passes.logits` gives, of the logits of the positions that this rank holds."""
        axis = self.world.axis("cp")
        held = positions_of(logits.shape[1] * axis.size, axis, torch.device("cpu")).tolist()
        rows = [row for row, position in enumerate(at) if position in held]
        places = [held.index(at[row]) for row in rows]
        if rows and hasattr(logits, "to_local"):
            from workers.training.parallel.tensor.vocabulary import gathered_at

            return dict(zip(rows, gathered_at(logits, rows, places), strict=True))
        return {row: logits[row, place] for row, place in zip(rows, places, strict=True)}

    @property
    def share(self) -> float:
        """What this rank's losses count for in a sum over all ranks: tensor-parallel ranks compute
        the same.
        """
        return 1.0 / self.run.plan.tp


class Passes(Protocol):
    """`gradients` leaves the step's reduced gradients on the parameters."""

    def gradients(self, first: int, factor: float) -> tuple[Tensor, float]:
        """Over the global batch from sample `first`: this rank's share of the summed token loss, in
        fp64, and seconds
        spent on data. The loss is multiplied by `factor` before the backward passes."""
        ...

    def evaluate(self, samples: Samples, count: int) -> Tensor:
        """Of `count` samples from the first: this rank's share of summed loss and of tokens, `[2]`
        in fp64.
        """
        ...

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """Of a batch that every rank has whole, row i at position `at[i]`: `{row: [vocab]}` of the
        rows that end here.

        To be called on all ranks. Gathered weights stay, for the next call.
        """
        ...


def passes_of(setting: Setting) -> Passes:
    if setting.run.plan.pp == 1:
        return Straight(setting)
    if setting.run.plan.schedule == "pipedream":
        from workers.training.parallel.pipeline.pipedream import PipeDream

        return PipeDream(setting)
    # torch's pipelining takes seconds to load
    from workers.training.parallel.pipeline.schedule_runner import Pipelined

    return Pipelined(setting)


class Straight:
    """Each micro-batch forward and backward before the next."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        [self.module] = setting.parallel.modules

    def gradients(self, first: int, factor: float) -> tuple[Tensor, float]:
        here, plan = self.setting, self.setting.run.plan
        blocks = here.blocks(first, plan.global_batch_size)
        total = torch.zeros((), dtype=torch.float64, device=here.world.device)
        data_s = 0.0
        for index, block in enumerate(blocks):
            started = time.perf_counter()
            with here.trace.split.within("data"):
                inputs, targets, documents = here.tensors(here.train, block)
            data_s += time.perf_counter() - started
            with ExitStack() as stack:
                stack.enter_context(products(plan.precision, here.world.device))
                stack.enter_context(here.parallel.backward_of(last=index + 1 == len(blocks)))
                here.tell("forward")
                here.seed_dropout(block)
                with here.memory.forward():
                    loss = here.loss_of(self.module, inputs, targets, documents, block)
                here.tell("backward")
                torch.autograd.backward(loss * factor)
                here.trace.split.enter("other")
            total += loss.detach()
        here.parallel.finish_gradients()
        return total * here.share, data_s

    def evaluate(self, samples: Samples, count: int) -> Tensor:
        here = self.setting
        total = torch.zeros(2, dtype=torch.float64, device=here.world.device)
        for block in here.blocks(0, count):
            here.tell("validation")
            inputs, targets, documents = here.tensors(samples, block)
            with products(here.run.plan.precision, here.world.device):
                total[0] += here.loss_of(self.module, inputs, targets, documents, None)
            total[1] += (targets >= 0).sum()
        here.parallel.release_gathered()
        return total * here.share

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        here = self.setting
        inputs, _ = cut(tokens_BS, tokens_BS, here.world.axis("cp"))
        with products(here.run.plan.precision, here.world.device):
            return here.held_logits(self.module(inputs), at)
