"""Keeps the embedding that the first and last stage of a pipeline share equal on both.

Does not depend on schedules or optimizers.
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


class TiedEmbedding:
    """Sums the gradients of both copies, so that equal updates keep the copies equal.

    Between ranks, each end sends its gradient to the other after data-parallel reduction (shards,
    if sharded). In a V-shaped pipeline both ends are on one rank: the first copy is updated, and
    the last one copies it.
    """

    def __init__(self, parts: list[Decoder], axis: Axis, plan: ParallelPlan) -> None:
        self.axis = axis
        ends = rank_of_stage(plan, 0), rank_of_stage(plan, plan.stages - 1)
        holders = [part for part in parts if part.embed is not None]
        self.first = next((part for part in holders if part.part.first), None)
        self.last = next((part for part in holders if part.part.last), None)
        self.on_one_rank = ends[0] == ends[1]
        self.peer: int | None = None
        if holders and not self.on_one_rank:
            assert axis.mesh is not None
            self.peer = int(
                axis.mesh.mesh.flatten()[ends[1] if self.first is not None else ends[0]]
            )

    def updated_copies(self, name: str) -> int:
        """How many stages hold a copy of parameter `name` that they update themselves."""
        return 2 if name == NAME and not self.on_one_rank else 1

    def add_gradients(self) -> None:
        """Replace each copy's gradient by the sum of both."""
        if self.on_one_rank and self.first is not None and self.last is not None:
            ours, theirs = embedding_weight(self.first), embedding_weight(self.last)
            assert ours.grad is not None and theirs.grad is not None
            local_tensor(ours.grad).add_(local_tensor(theirs.grad))
            theirs.grad = None
        elif self.peer is not None:
            part = self.first or self.last
            assert part is not None
            gradient = embedding_weight(part).grad
            assert gradient is not None
            mine = local_tensor(gradient)
            theirs = torch.empty_like(mine)
            group = self.axis.group
            exchange = [
                dist.P2POp(dist.isend, mine, self.peer, group),
                dist.P2POp(dist.irecv, theirs, self.peer, group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(theirs)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the updated first copy to the last, if both are on this rank."""
        if self.on_one_rank and self.first is not None and self.last is not None:
            local_tensor(embedding_weight(self.last)).copy_(
                local_tensor(embedding_weight(self.first))
            )


def embedding_weight(part: Decoder) -> Tensor:
    """The token embedding's weight."""
    assert part.embed is not None
    return part.embed.weight
