"""Keeps the embedding shared by PipeDream's first and last stage equal, without waiting.

Does not depend on weight versions or optimizers.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.training.parallel.mesh import World, extra_group
from workers.training.parallel.pipeline.tied_embedding import TiedEmbedding, embedding_weight


class StaleTiedEmbedding(TiedEmbedding):
    """Update b of both copies uses the last stage's gradient of batch b and the first stage's of
    batch b - S, for S stages.

    The first stage computes its gradient of batch b when the last stage is S - 1 batches ahead;
    after S batches it has arrived, so no stage waits. Both copies are updated by the same numbers,
    so they stay equal version by version. When the pipeline is flushed (`flushing`), pending
    gradients are awaited and added to that batch's.
    """

    def __init__(self, parts: list[Decoder], world: World, plan: ParallelPlan) -> None:
        """Collective: makes two process groups."""
        axis = world.axis("pp")
        super().__init__(parts, axis, plan)
        self.delay = axis.size
        self.flushing = True
        # one communicator per direction: an unawaited message would block the other direction
        self.to_last, self.to_first = (
            extra_group(world, "pp", "to last"),
            extra_group(world, "pp", "to first"),
        )
        self._own: deque[Tensor] = deque()  # the first stage's gradients that are not yet added
        self._unreceived = 0  # first-stage gradients that the last stage has not received
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def add_gradients(self) -> None:
        """Replace the gradient by the delayed sum; see the class."""
        part = self.first or self.last
        if part is None or self.peer is None:
            return
        weight = embedding_weight(part)
        assert weight.grad is not None
        mine = weight.grad
        if self.first is not None:
            self._send(mine, self.to_last)
            self._own.append(mine)
            total = self._receive(mine, self.to_first)
            while len(self._own) > (0 if self.flushing else self.delay):
                total += self._own.popleft()
        else:
            self._send(mine, self.to_first)
            self._unreceived += 1
            total = mine.clone()
            while self._unreceived > (0 if self.flushing else self.delay):
                total += self._receive(mine, self.to_last)
                self._unreceived -= 1
        weight.grad = total
        while len(self._sends) > (0 if self.flushing else 2 * self.delay):
            self._sends.popleft()[0].wait()

    def _send(self, gradient: Tensor, group: Any) -> None:
        assert self.peer is not None
        self._sends.append((dist.isend(gradient, self.peer, group), gradient))

    def _receive(self, like: Tensor, group: Any) -> Tensor:
        assert self.peer is not None
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(received, self.peer, group)
        return received
