"""The embedding that first and last stage of a pipeline share: two copies that stay one parameter.

Knows the two ends; does not know schedules or optimizers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.specs.plan import ParallelPlan
from workers.metrics.memory import local_tensor
from workers.models.decoder import Decoder
from workers.training.parallel.mesh import Axis
from workers.training.parallel.pipeline.stage_layers import rank_of_stage

NAME = "embed.weight"


class Ties:
    """Sums the two copies' gradients, so that equal updates keep the copies equal.

    Between ranks each end sends its gradient to the other, after reductions over data-parallel
    ranks (sharded ones send
    shards). A V-shaped pipeline has both ends on one rank: there the first copy is updated, and the
    last one follows.
    """

    def __init__(self, parts: list[Decoder], axis: Axis, plan: ParallelPlan) -> None:
        self.axis = axis
        ends = rank_of_stage(plan, 0), rank_of_stage(plan, plan.stages - 1)
        held = [part for part in parts if part.embed is not None]
        self.first = next((part for part in held if part.part.first), None)
        self.last = next((part for part in held if part.part.last), None)
        self.folded = ends[0] == ends[1]
        self.other: int | None = None
        if held and not self.folded:
            assert axis.mesh is not None
            self.other = int(
                axis.mesh.mesh.flatten()[ends[1] if self.first is not None else ends[0]]
            )

    def ends(self, name: str) -> int:
        """How many stages hold a copy that is updated by itself."""
        return 2 if name == NAME and not self.folded else 1

    def add_gradients(self) -> None:
        if self.folded and self.first is not None and self.last is not None:
            ours, theirs = weight_of(self.first), weight_of(self.last)
            assert ours.grad is not None and theirs.grad is not None
            local_tensor(ours.grad).add_(local_tensor(theirs.grad))
            theirs.grad = None
        elif self.other is not None:
            part = self.first or self.last
            assert part is not None
            gradient = weight_of(part).grad
            assert gradient is not None
            mine = local_tensor(gradient)
            theirs = torch.empty_like(mine)
            group = self.axis.group
            exchange = [
                dist.P2POp(dist.isend, mine, self.other, group),
                dist.P2POp(dist.irecv, theirs, self.other, group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(theirs)

    @torch.no_grad()
    def copy_weights(self) -> None:
        if self.folded and self.first is not None and self.last is not None:
            local_tensor(weight_of(self.last)).copy_(local_tensor(weight_of(self.first)))


def weight_of(part: Decoder) -> Tensor:
    assert part.embed is not None
    return part.embed.weight
