"""The driver rank: sends each step to the workers, then computes logits from their hidden states.

Does not depend on requests: the engine decides what is in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from workers.inference.adapters.low_rank_slots import LowRankSlots
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.parallel.groups import RankGroup
from workers.inference.parallel.messages import CACHE, IDLE, READ, STEP, encode_step_inputs
from workers.inference.runner import Runner
from workers.inference.scheduling.step_inputs import StepInputs, build_step_inputs
from workers.inference.scheduling.step_plan import StepPlan
from workers.models.decoder import Decoder


class DriverRunner(Runner):
    """Runs the last stage, with its shard of each layer.

    As many steps may be in flight as there are stages, so that each stage computes another one.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        rank_group: RankGroup,
        adapters: LowRankSlots | None = None,
    ) -> None:
        super().__init__(decoder, cache, adapters)
        self.rank_group, self.depth = rank_group, rank_group.place.stages
        rank_group.broadcast(CACHE, [cache.blocks, cache.block_size, cache.swap])

    def run(self, plan: StepPlan) -> Tensor:
        """Logits of one step."""
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], Tensor]:
        """Start a step; the result waits for its logits."""
        inputs = build_step_inputs(plan, self.cache.block_size)
        self.rank_group.broadcast(STEP, encode_step_inputs(inputs))
        if self.rank_group.place.stages == 1:
            return partial(self.compute, inputs)
        shape = (1, len(inputs.tokens), self.decoder.spec.hidden)
        return partial(self._finish, inputs, self.rank_group.receive_hidden(shape, self.dtype))

    def _finish(self, inputs: StepInputs, receive: Callable[[], Tensor]) -> Tensor:
        return self.compute(inputs, receive())

    def idle(self) -> None:
        """Send a heartbeat to the workers; raises ConnectionError if one disconnected.

        Call it more often than the groups' timeout.
        """
        self.rank_group.broadcast(IDLE)
        self.rank_group.flush()


def distributed_forward(decoder: Decoder, rank_group: RankGroup) -> Callable[[Tensor], Tensor]:
    """`decoder.through` of ids `[B, S]`, computed by all ranks of the group."""

    @torch.inference_mode()
    def through(ids_BS: Tensor) -> Tensor:
        rank_group.broadcast(READ, [*ids_BS.shape, *ids_BS.flatten().tolist()])
        if rank_group.place.stages == 1:
            return decoder.through(ids_BS)
        dtype = next(decoder.parameters()).dtype
        shape = (*ids_BS.shape, decoder.spec.hidden)
        return decoder.through(rank_group.receive_hidden(shape, dtype)())

    return through
