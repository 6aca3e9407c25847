"""Tensors sent between pipeline stages, and forward-only passes for validation and text samples.

Does not depend on schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.decoder import Decoder
from workers.models.layers.documents import Documents
from workers.training.data.samples import Samples
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import DTYPES, matmul_context
from workers.training.parallel.context.apply import shard_sequence
from workers.training.parallel.mesh import Axis
from workers.training.parallel.pipeline.stage_layers import rank_of_stage, stages_on_rank

Sends = list[tuple[Any, Tensor]]  # pending sends and the tensors they read


def boundary_tensors(part: Decoder, context: StepContext) -> tuple[Tensor, Tensor]:
    """A part's input and output for one micro-batch at this rank's positions, as meta tensors."""
    run, dtype = context.run, DTYPES[context.run.plan.precision]
    shape, length = (
        (run.plan.micro_batch_size, context.positions),
        run.train.seq_len // run.plan.cp,
    )
    hidden = torch.empty(*shape, run.model.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[0], length, dtype=torch.int64, device="meta")
    logits = torch.empty(
        shape[0], length, run.model.vocab, dtype=dtype, device="meta", requires_grad=True
    )
    return tokens if part.part.first else hidden, logits if part.part.last else hidden


def global_rank(axis: Axis, index: int) -> int:
    """The world rank of the rank at `index` of this rank's axis."""
    assert axis.mesh is not None
    return int(axis.mesh.mesh.flatten()[index])


@torch.no_grad()
def pipeline_evaluate(context: StepContext, samples: Samples, count: int) -> Tensor:
    """`MicrobatchRunner.evaluate` of a pipeline: forward passes of one micro-batch after another.

    A stage starts the next micro-batch as soon as it has sent the previous one.
    """
    total = torch.zeros(2, dtype=torch.float64, device=context.world.device)
    sends: Sends = []
    for microbatch in context.microbatches(0, count):
        context.progress.enter("validation")
        inputs, targets, documents = context.load(samples, microbatch)
        logits = _forward(context, inputs, documents, sends)
        if logits is not None:
            total[0] += context.loss(logits, targets, None)
            total[1] += (targets >= 0).sum()
        while len(sends) > 2 * context.run.plan.stages:
            sends.pop(0)[0].wait()
    _wait_all(sends)
    context.parallel.release_gathered()
    return total * context.loss_share


@torch.no_grad()
def pipeline_logits(
    context: StepContext, tokens_BS: Tensor, at: Sequence[int]
) -> dict[int, Tensor]:
    """`MicrobatchRunner.logits` of a pipeline; only ranks of the last stage return rows."""
    sends: Sends = []
    inputs, _ = shard_sequence(tokens_BS, tokens_BS, context.world.axis("cp"))
    logits = _forward(context, inputs, None, sends)
    rows = {} if logits is None else context.local_logits(logits, at)
    _wait_all(sends)
    return rows


def _forward(
    context: StepContext, x: Tensor, documents: Documents | None, sends: Sends
) -> Tensor | None:
    """Tokens `[B, S]` at this rank's positions through its stages; logits if it holds the last.

    Sends to the next stage are appended to `sends`.
    """
    plan, axis, logits = context.run.plan, context.world.axis("pp"), None
    device = context.world.device
    hidden = (
        x.shape[0],
        x.shape[1] // (plan.tp if plan.sequence_parallel else 1),
        context.run.model.hidden,
    )
    stages = zip(
        stages_on_rank(plan, axis.rank),
        context.parallel.modules,
        context.parallel.parts,
        strict=True,
    )
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
