"""The embedding that first and last stage of PipeDream share: two copies that stay one parameter,
without waiting.

Knows what each end sends; does not know versions or optimizers.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.training.parallel.mesh import Axis
from workers.training.parallel.pipeline.tied_embedding import Ties, weight_of


class StaleTies(Ties):
    """Both ends make update b with the last stage's gradient of batch b and the first stage's of
    batch b - S.

    The first stage's of batch b is made when the last stage is S - 1 batches on already; S later it
    has arrived before
    what it is added to can be computed, so that nobody waits. The updates of both ends are of the
    same numbers, which
    keeps the copies equal version by version. Where the pipeline is flushed (`flushing`), what is
    on its way is waited
    for and added to that batch's.
    """

    def __init__(self, parts: list[Decoder], axis: Axis, plan: ParallelPlan) -> None:
        super().__init__(parts, axis, plan)
        self.late = axis.size
        self.flushing = True
        # by direction, on communicators of their own: what is not awaited yet would hold up what
        # comes the other way
        self.groups: tuple[Any, Any] = (axis.group, axis.group)
        self._own: deque[Tensor] = deque()  # the first stage's, until they count
        self._owed = 0  # of the first stage's, those that the last one has not received
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def add_gradients(self) -> None:
        part = self.first or self.last
        if part is None or self.other is None:
            return
        weight, (to_last, to_first) = weight_of(part), self.groups
        assert weight.grad is not None
        mine = weight.grad
        if self.first is not None:
            self._send(mine, to_last)
            self._own.append(mine)
            total = self._received(mine, to_first)
            while len(self._own) > (0 if self.flushing else self.late):
                total += self._own.popleft()
        else:
            self._send(mine, to_first)
            self._owed += 1
            total = mine.clone()
            while self._owed > (0 if self.flushing else self.late):
                total += self._received(mine, to_last)
                self._owed -= 1
        weight.grad = total
        while len(self._sent) > (0 if self.flushing else 2 * self.late):
            self._sent.popleft()[0].wait()

    def _send(self, gradient: Tensor, group: Any) -> None:
        assert self.other is not None
        self._sent.append((dist.isend(gradient, self.other, group), gradient))

    def _received(self, like: Tensor, group: Any) -> Tensor:
        assert self.other is not None
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(found, self.other, group)
        return found
