"""The leader's part of a team: each step is told before it is computed, and its logits come of what
the others give.

Knows works and hidden states; what is in a step, and what becomes of it, is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from workers.inference.cache import PagedCache
from workers.inference.parallel.groups import Team
from workers.inference.parallel.messages import CACHE, IDLE, READ, WORK, numbers_of
from workers.inference.runner import Runner
from workers.inference.step import StepPlan
from workers.inference.work import Work, work_of
from workers.models.decoder import Decoder


class LeadingRunner(Runner):
    """Of the last stage, with its share of each layer. As many steps as there are stages may be
    under way, so that each
    stage computes another one."""

    def __init__(self, decoder: Decoder, cache: PagedCache, team: Team) -> None:
        super().__init__(decoder, cache)
        self.team, self.depth = team, team.place.stages
        team.tell(CACHE, [cache.blocks, cache.block_size, cache.swap])

    def run(self, plan: StepPlan) -> Tensor:
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], Tensor]:
        work = work_of(plan, self.cache.block_size)
        self.team.tell(WORK, numbers_of(work))
        if self.team.place.stages == 1:
            return partial(self.compute, work)
        shape = (1, len(work.tokens), self.decoder.spec.hidden)
        return partial(self._finish, work, self.team.given(shape, self.dtype))

    def _finish(self, work: Work, given: Callable[[], Tensor]) -> Tensor:
        return self.compute(work, given())

    def idle(self) -> None:
        """Tells the others that there is nothing to do, and finds out whether they are there. To be
        called more often
        than anyone's patience ends."""
        self.team.tell(IDLE)
        self.team.settle()


def reading(decoder: Decoder, team: Team) -> Callable[[Tensor], Tensor]:
    """As `decoder.through`, of ids `[B, S]`, by all ranks of the team."""

    @torch.inference_mode()
    def through(ids_BS: Tensor) -> Tensor:
        team.tell(READ, [*ids_BS.shape, *ids_BS.flatten().tolist()])
        if team.place.stages == 1:
            return decoder.through(ids_BS)
        dtype = next(decoder.parameters()).dtype
        return decoder.through(team.given((*ids_BS.shape, decoder.spec.hidden), dtype)())

    return through
