"""Micro-batches through a pipeline by one of torch's schedules, which flush at the end of every
step.

Knows stages; does not know what a schedule's order is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from workers.models.layers.documents import Documents
from workers.training.data.samples import Samples
from workers.training.loop.microbatches import Setting
from workers.training.numerics.precision import products
from workers.training.parallel.batch_sharding import Block
from workers.training.parallel.pipeline.stage import Stage
from workers.training.parallel.pipeline.stage_layers import stages_of
from workers.training.parallel.pipeline.stage_transfer import ends_of, evaluate, logits_of
from workers.training.parallel.pipeline.torch_schedules import schedule_of


class Pipelined:
    """A step's micro-batches through all stages. Only the last stage's rank has losses."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        run, world, parallel = setting.run, setting.world, setting.parallel
        axis = world.axis("pp")
        ends = [ends_of(part, setting) for part in parallel.parts]
        self.stages = [
            Stage(
                module,
                index=index,
                stages=run.plan.stages,
                ends=both,
                group=axis.group,
                device=world.device,
                around=self._around,
                packed=lambda micro_batch: self._documents[self._offset + micro_batch],
            )
            for module, both, index in zip(
                parallel.modules, ends, stages_of(run.plan, axis.rank), strict=True
            )
        ]
        self.schedule, self.at_once = schedule_of(run.plan, self.stages, self._loss)
        self._blocks: list[Block] = []
        self._done = 0  # micro-batches whose loss is known
        self._offset = 0  # of the present call's micro-batches in the step
        self._total = torch.zeros((), dtype=torch.float64, device=world.device)
        self._factor = 1.0
        self._documents: list[Documents | None] = []

    @property
    def holds_first(self) -> bool:
        return bool(self.stages[0].is_first)

    @property
    def holds_last(self) -> bool:
        return bool(self.stages[-1].is_last)

    def gradients(self, first: int, factor: float) -> tuple[Tensor, float]:
        here, plan = self.setting, self.setting.run.plan
        self._blocks, self._factor, self._done = (
            here.blocks(first, plan.global_batch_size),
            factor,
            0,
        )
        self._total.zero_()
        started = time.perf_counter()
        with here.trace.split.within("data"):
            tensors = [here.tensors(here.train, block) for block in self._blocks]
        self._documents = [each[2] for each in tensors]
        data_s = time.perf_counter() - started
        assert here.trace.timeline is not None
        here.trace.timeline.begin()
        with products(plan.precision, here.world.device), here.parallel.backward_of(last=False):
            for offset in range(0, len(tensors), self.at_once):
                self._offset = offset
                some = tensors[offset : offset + self.at_once]
                inputs = (torch.cat([each[0] for each in some]),) if self.holds_first else ()
                targets = (
                    {"target": torch.cat([each[1] for each in some])} if self.holds_last else {}
                )
                self.schedule.step(*inputs, **targets, return_outputs=False)
        here.trace.timeline.end()
        here.parallel.finish_gradients()
        return self._total * here.share, data_s

    def evaluate(self, samples: Samples, count: int) -> Tensor:
        return evaluate(self.setting, samples, count)

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        return logits_of(self.setting, tokens_BS, at)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Called on the last stage for one micro-batch after another."""
        loss = self.setting.loss(logits, targets, self._blocks[self._done])
        self._done += 1
        self._total += loss.detach()
        if self.setting.trace.timeline is not None:
            self.setting.trace.timeline.longer()
        return loss * self._factor

    @contextmanager
    def _around(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        here = self.setting
        here.tell("forward" if kind == "F" else "backward")
        if kind == "F":
            here.seed_dropout(self._blocks[self._offset + micro_batch])
        counting = here.memory.forward() if kind == "F" and micro_batch == 0 else nullcontext()
        with counting, here.trace.action(kind, stage, self._offset + micro_batch):
            yield
        here.trace.split.enter("other")
