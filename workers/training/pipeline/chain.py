"""What goes between stages, and forward passes alone through all of them, for validation.

Knows stages and neighbours; does not know schedules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.decoder import Decoder
from workers.training.data.samples import Samples
from workers.training.mesh import Axis
from workers.training.parallelize import DTYPES
from workers.training.passes import Setting
from workers.training.pipeline.parts import rank_of_stage, stages_of
from workers.training.precision import products


def ends_of(part: Decoder, setting: Setting) -> tuple[Tensor, Tensor]:
    """What goes into and comes out of a part for one micro-batch, as meta tensors: this rank's positions."""
    run, dtype = setting.run, DTYPES[setting.run.plan.precision]
    shape, length = (run.plan.micro_batch_size, setting.positions), setting.run.train.seq_len // run.plan.cp
    hidden = torch.empty(*shape, run.model.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[0], length, dtype=torch.int64, device="meta")
    logits = torch.empty(shape[0], length, run.model.vocab, dtype=dtype, device="meta", requires_grad=True)
    return tokens if part.part.first else hidden, logits if part.part.last else hidden


def global_rank(axis: Axis, place: int) -> int:
    """The rank in the world of whoever stands at `place` of this rank's axis."""
    assert axis.mesh is not None
    return int(axis.mesh.mesh.flatten()[place])


@torch.no_grad()
def evaluate(setting: Setting, samples: Samples, count: int) -> Tensor:
    """Of `count` samples from the first: this rank's share of summed loss and of tokens, `[2]` in fp64.

    One micro-batch after another goes through this rank's stages; a later one is on its way when a stage has sent an
    earlier one on.
    """
    plan, axis, device = setting.run.plan, setting.world.axis("pp"), setting.world.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    here = list(zip(stages_of(plan, axis.rank), setting.parallel.modules, setting.parallel.parts, strict=True))
    sent: list[tuple[Any, Tensor]] = []
    with products(plan.precision, device):
        for block in setting.blocks(0, count):
            inputs, targets = setting.tensors(samples, block)
            x = inputs
            for index, module, part in here:
                if index > 0 and rank_of_stage(plan, index - 1) != axis.rank:
                    x = torch.empty_like(ends_of(part, setting)[0], device=device)
                    dist.recv(x, global_rank(axis, rank_of_stage(plan, index - 1)), axis.group)
                x = module(x)
                if part.part.last:
                    total[0] += setting.loss(x, targets, None)
                    total[1] += (targets >= 0).sum()
                elif rank_of_stage(plan, index + 1) != axis.rank:
                    x = x.contiguous()
                    to = global_rank(axis, rank_of_stage(plan, index + 1))
                    sent.append((dist.isend(x, to, axis.group), x))
            while len(sent) > 2 * plan.stages:
                sent.pop(0)[0].wait()
    for work, _ in sent:
        work.wait()
    setting.parallel.release_gathered()
    return total * setting.share
