"""Tensors sent between pipeline stages, and forward-only passes for validation and text samples.

Does not depend on schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.models.decoder import Decoder
from workers.models.layers.documents import Documents
from workers.training.data.rows import RowSource
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import DTYPES, matmul_context
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.context.apply import shard_sequence
from workers.training.parallel.mesh import Axis
from workers.training.parallel.pipeline.stage_layers import rank_of_stage, stages_on_rank

Sends = list[tuple[Any, Tensor]]  # pending sends and the tensors they read


def boundary_tensors(part: Decoder, context: StepContext) -> tuple[Tensor, Tensor]:
    """A part's input and output for one micro-batch at this rank's positions, as meta tensors.

    Of B rows and S positions: token ids [B, S] int64 into the first stage, logits [B, S, vocab] (or
    scores [B, S, 1]) out of the last one, hidden states [B, positions, hidden] between stages.
    """
    run, dtype, model = context.run, DTYPES[context.run.plan.precision], part.spec
    shape, length = (
        (run.plan.micro_batch_size, context.positions),
        run.train.seq_len // run.plan.cp,
    )
    hidden = torch.empty(*shape, model.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[0], length, dtype=torch.int64, device="meta")
    width = 1 if model.scalar_head else model.vocab
    logits = torch.empty(shape[0], length, width, dtype=dtype, device="meta", requires_grad=True)
    return tokens if part.part.first else hidden, logits if part.part.last else hidden


def global_rank(axis: Axis, index: int) -> int:
    """The world rank of the rank at `index` of this rank's axis."""
    assert axis.mesh is not None
    return int(axis.mesh.mesh.flatten()[index])


@torch.no_grad()
def pipeline_evaluate(
    context: StepContext, samples: RowSource, count: int, *, phase: str = "validation"
) -> Tensor:
    """`MicrobatchRunner.evaluate` of a pipeline: forward passes of one micro-batch after another.

    A stage starts the next micro-batch as soon as it has sent the previous one.
    """
    total = torch.zeros((), dtype=torch.float64, device=context.world.device)
    sends: Sends = []
    for microbatch in context.microbatches(0, count):
        context.progress.enter(phase)
        batch = with_reference(context, context.load(samples, microbatch))
        logits = _forward(context, batch.inputs, batch.documents, sends)
        if logits is not None:
            total += context.loss(logits, batch, training=False)
        while len(sends) > 2 * context.run.plan.stages:
            sends.pop(0)[0].wait()
    _wait_all(sends)
    context.parallel.release_gathered()
    return context.shares(total)


@torch.no_grad()
def pipeline_logits(
    context: StepContext, tokens_BS: Tensor, at: Sequence[int]
) -> dict[int, Tensor]:
    """`MicrobatchRunner.logits` of a pipeline; only ranks of the last stage return rows."""
    sends: Sends = []
    inputs = shard_sequence(tokens_BS, context.world.axis("cp"))
    logits = _forward(context, inputs, None, sends)
    rows = {} if logits is None else context.local_logits(logits, at)
    _wait_all(sends)
    return rows


@torch.no_grad()
def pipeline_outputs(context: StepContext, batch: Batch) -> Tensor | None:
    """The logits [B, S, vocab] of a batch at this rank's positions; None before the last stage."""
    sends: Sends = []
    logits = _forward(context, batch.inputs, batch.documents, sends)
    _wait_all(sends)
    return logits


def with_reference(context: StepContext, batch: Batch) -> Batch:
    """`StepContext.with_reference` of a pipeline."""
    if context.frozen is None or not context.objective.reads_reference:
        return batch
    return score_reference(context, batch)


@torch.no_grad()
def score_reference(context: StepContext, batch: Batch) -> Batch:
    """The batch with the outputs of the frozen module, on ranks of the last stage."""
    assert context.frozen is not None
    sends: Sends = []
    parts = context.frozen.parts
    with context.frozen.computing():
        logits = _forward(context, batch.inputs, batch.documents, sends, parts, parts)
        _wait_all(sends)
        if logits is None:
            return batch
        return replace(batch, reference=context.objective.reference_of(logits, batch))


def _forward(
    context: StepContext,
    x: Tensor,
    documents: Documents | None,
    sends: Sends,
    modules: Sequence[nn.Module] = (),
    parts: Sequence[Decoder] = (),
) -> Tensor | None:
    """Tokens `[B, S]` at this rank's positions through its stages; logits if it holds the last.

    Sends to the next stage are appended to `sends`. `modules` and `parts` default to the trained
    ones.
    """
    plan, axis, logits = context.run.plan, context.world.axis("pp"), None
    device = context.world.device
    modules, parts = modules or context.parallel.modules, parts or context.parallel.parts
    hidden = (
        x.shape[0],
        x.shape[1] // (plan.tp if plan.sequence_parallel else 1),
        parts[0].spec.hidden,
    )
    stages = zip(stages_on_rank(plan, axis.rank), modules, parts, strict=True)
    with matmul_context(plan.precision, device):
        for index, module, part in stages:
            if index > 0 and rank_of_stage(plan, index - 1) != axis.rank:
                x = torch.empty(hidden, dtype=DTYPES[plan.precision], device=device)
                dist.recv(x, global_rank(axis, rank_of_stage(plan, index - 1)), axis.group)
            x = module(x, documents)
            if part.part.last:
                logits = x
            elif rank_of_stage(plan, index + 1) != axis.rank:
                x = x.contiguous()
                to = global_rank(axis, rank_of_stage(plan, index + 1))
                sends.append((dist.isend(x, to, axis.group), x))
    return logits


def _wait_all(sends: Sends) -> None:
    for work, _ in sends:
        work.wait()
