"""Where an iteration's groups of answers come from: sampled on the training ranks in turn.

`separate.source` has the other one. Does not depend on what is learned from them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from workers.posttraining.reinforcement.rollouts import Rollout
from workers.posttraining.reinforcement.sampling.groups import GroupMaker, sampling_seed
from workers.posttraining.reinforcement.sampling.prompts import Prompts
from workers.posttraining.reinforcement.sampling.sampler import Sampler
from workers.training.loop.rank_sync import run_on_leaders
from workers.training.loop.step_context import StepContext


class AnswerSource(Protocol):
    """Samples groups of answers to prompts by their position in the run. All calls are
    collective.
    """

    def begin(self, iteration: int, step: int) -> None:
        """Sample with the weights after update `step` - 1, the first of `iteration`."""
        ...

    def positions(self, iteration: int) -> list[int]:
        """The prompts of an iteration."""
        ...

    def more(self, count: int) -> list[int]:
        """The positions of `count` further prompts."""
        ...

    def answer(self, positions: Sequence[int], step: int) -> list[list[Rollout]]:
        """The groups of these prompts with rewards, equal on all ranks."""
        ...

    def end(self, iteration: int) -> None:
        """The iteration has its answers."""
        ...

    def saved(self) -> None:
        """The answers of the iteration that ended are stored. Rank 0 only."""
        ...

    def updated(self, step: int) -> None:
        """Update `step` is done."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        ...


class ColocatedSource:
    """Every training rank samples its share with a full copy of the model."""

    def __init__(
        self, context: StepContext, sampler: Sampler, prompts: Prompts, maker: GroupMaker
    ) -> None:
        self.context, self.world = context, context.world
        self.sampler, self.prompts, self.maker = sampler, prompts, maker
        self.options = maker.options
        self.next_position = 0

    def begin(self, iteration: int, step: int) -> None:
        """See `AnswerSource`."""
        self.sampler.sync(step - 1)

    def positions(self, iteration: int) -> list[int]:
        """See `AnswerSource`."""
        return self.more(self.options.prompts_per_step)

    def more(self, count: int) -> list[int]:
        """See `AnswerSource`."""
        first = self.next_position
        self.next_position += count
        return list(range(first, self.next_position))

    def answer(self, positions: Sequence[int], step: int) -> list[list[Rollout]]:
        """See `AnswerSource`: each rank answers every size-th prompt."""
        context, world, size = self.context, self.world, self.options.group_size
        own = [
            (position, self.prompts.at(position))
            for position in positions
            if position % world.size == world.rank
        ]
        began = [0.0]

        def alive() -> None:
            if time.perf_counter() - began[0] > 0.5:
                context.progress.enter("generation")
                began[0] = time.perf_counter()

        seed = context.run.train.seed
        groups: dict[int, list[Rollout]] = {}

        def sample() -> None:
            alive()
            answered = self.sampler.sample(
                [(prompt.ids, sampling_seed(seed, at)) for at, prompt in own],
                answers=size,
                on_step=alive,
            )
            for (position, prompt), answers in zip(own, answered, strict=True):
                groups[position] = self.maker.make(prompt, answers, step=step)
            context.progress.enter("rewards")
            flat = [each for group in groups.values() for each in group]
            self.maker.rate(flat, [prompt.where for _, prompt in own for _ in range(size)])

        # every rank answers its share; if one fails, all do
        run_on_leaders(world, sample, leads=True)
        gathered = _gather(world.size, groups)
        return [gathered[position] for position in positions]

    def end(self, iteration: int) -> None:
        """See `AnswerSource`: the updates need the memory of keys and values."""
        self.sampler.release()

    def saved(self) -> None:
        """See `AnswerSource`."""

    def updated(self, step: int) -> None:
        """See `AnswerSource`."""

    def state(self) -> dict[str, Any]:
        """See `AnswerSource`."""
        return {"next_position": self.next_position}

    def restore(self, state: dict[str, Any]) -> None:
        """See `AnswerSource`."""
        self.next_position = int(state["next_position"])


def _gather(size: int, groups: dict[int, list[Rollout]]) -> dict[int, list[Rollout]]:
    if size == 1:
        return groups
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, groups)
    return {position: group for part in parts for position, group in part.items()}
