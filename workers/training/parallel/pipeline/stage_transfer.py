"""What goes between stages, and forward passes alone through all of them, for validation and the
writing of texts.

Knows stages and neighbours; does not know schedules.
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
from workers.training.loop.microbatches import Setting
from workers.training.numerics.precision import products
from workers.training.parallel.context.apply import cut
from workers.training.parallel.mesh import Axis
from workers.training.parallel.parallelize import DTYPES
from workers.training.parallel.pipeline.stage_layers import rank_of_stage, stages_of

Sent = list[tuple[Any, Tensor]]  # messages on their way, and what must live as long


def ends_of(part: Decoder, setting: Setting) -> tuple[Tensor, Tensor]:
    """What goes into and comes out of a part for one micro-batch, as meta tensors: this rank's
    positions.
    """
    run, dtype = setting.run, DTYPES[setting.run.plan.precision]
    shape, length = (
        (run.plan.micro_batch_size, setting.positions),
        setting.run.train.seq_len // run.plan.cp,
    )
    hidden = torch.empty(*shape, run.model.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[0], length, dtype=torch.int64, device="meta")
    logits = torch.empty(
        shape[0], length, run.model.vocab, dtype=dtype, device="meta", requires_grad=True
    )
    return tokens if part.part.first else hidden, logits if part.part.last else hidden


def global_rank(axis: Axis, place: int) -> int:
    """The rank in the world of whoever stands at `place` of this rank's axis."""
    assert axis.mesh is not None
    return int(axis.mesh.mesh.flatten()[place])


@torch.no_grad()
def evaluate(setting: Setting, samples: Samples, count: int) -> Tensor:
    """Of `count` samples from the first: this rank's share of summed loss and of tokens, `[2]` in
    fp64.

    One micro-batch after another goes through this rank's stages; a later one is on its way when a
    stage has sent an
    earlier one on.
    """
    total = torch.zeros(2, dtype=torch.float64, device=setting.world.device)
    sent: Sent = []
    for block in setting.blocks(0, count):
        setting.tell("validation")
        inputs, targets, documents = setting.tensors(samples, block)
        logits = _through(setting, inputs, documents, sent)
        if logits is not None:
            total[0] += setting.loss(logits, targets, None)
            total[1] += (targets >= 0).sum()
        while len(sent) > 2 * setting.run.plan.stages:
            sent.pop(0)[0].wait()
    _settle(sent)
    setting.parallel.release_gathered()
    return total * setting.share


@torch.no_grad()
def logits_of(setting: Setting, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
    """`Passes.logits`: what the last stage's ranks find; nothing on all others."""
    sent: Sent = []
    inputs, _ = cut(tokens_BS, tokens_BS, setting.world.axis("cp"))
    logits = _through(setting, inputs, None, sent)
    found = {} if logits is None else setting.held_logits(logits, at)
    _settle(sent)
    return found


def _through(setting: Setting, x: Tensor, documents: Documents | None, sent: Sent) -> Tensor | None:
    """Tokens `[B, S]`, as this rank holds them, through its stages; the logits, where the last
    stage is one of them.

    What is on its way to the next stage is kept in `sent`.
    """
    plan, axis, found = setting.run.plan, setting.world.axis("pp"), None
    hidden = (
        x.shape[0],
        x.shape[1] // (plan.tp if plan.sequence_parallel else 1),
        setting.run.model.hidden,
    )
    here = zip(
        stages_of(plan, axis.rank), setting.parallel.modules, setting.parallel.parts, strict=True
    )
    with products(plan.precision, setting.world.device):
        for index, module, part in here:
            if index > 0 and rank_of_stage(plan, index - 1) != axis.rank:
                x = torch.empty(hidden, dtype=DTYPES[plan.precision], device=setting.world.device)
                dist.recv(x, global_rank(axis, rank_of_stage(plan, index - 1)), axis.group)
            x = module(x, documents)
            if part.part.last:
                found = x
            elif rank_of_stage(plan, index + 1) != axis.rank:
                x = x.contiguous()
                to = global_rank(axis, rank_of_stage(plan, index + 1))
                sent.append((dist.isend(x, to, axis.group), x))
    return found


def _settle(sent: Sent) -> None:
    for work, _ in sent:
        work.wait()
