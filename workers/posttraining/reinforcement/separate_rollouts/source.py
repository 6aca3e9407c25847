"""Groups of answers from rollout ranks, requested ahead as far as `staleness.max` allows.

The training side: rank 0 talks to the store, and all ranks get the same groups. Does not depend on
how answers are sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from workers.models.weights.parameter_shapes import named_weights
from workers.posttraining.reinforcement.rollouts import Rollout, oldest_version
from workers.posttraining.reinforcement.sampling.groups import GroupMaker
from workers.posttraining.reinforcement.sampling.weight_copies import empty_decoder, full_weights
from workers.posttraining.reinforcement.separate_rollouts.exchange import Exchange, RolloutRankError
from workers.posttraining.reinforcement.separate_rollouts.group_files import parse_group
from workers.posttraining.reinforcement.separate_rollouts.weight_link import WeightLink
from workers.runtime.exit_codes import RunServerLost, UserError
from workers.training.loop.rank_sync import broadcast_decision
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import DTYPES

_CLASSES = {"user_error": UserError, "preempted": RunServerLost}  # errors by exit class


class SeparateSource:
    """An `AnswerSource` of `ranks` rollout ranks.

    Iteration j may be sampled as soon as weights after update j x (updates per iteration) -
    `staleness.max` are published, which happens after every update if answers may be stale.
    """

    def __init__(
        self,
        context: StepContext,
        maker: GroupMaker,
        exchange: Exchange | None,
        link: WeightLink | None,
        *,
        stored: Collection[int] = (),
    ) -> None:
        """`exchange` and `link` are rank 0's; iterations `stored` by an earlier attempt are not
        sampled again.
        """
        self.context, self.world = context, context.world
        self.options, self.maker = maker.options, maker
        self.exchange, self.link = exchange, link
        self.leads = context.world.rank == 0
        self.stored = frozenset(stored)
        self.version = -1
        self.next_position = 0
        self.assigned: dict[int, list[int]] = {}  # positions of iterations without all answers
        self._requested: set[int] = set()
        self._earlier: set[int] | None = None
        self._targets = named_weights(empty_decoder(context.run, torch.device("meta")))
        self._iterations = -(-context.run.train.steps // self.options.updates_per_step)

    def begin(self, iteration: int, step: int) -> None:
        """See `AnswerSource`."""
        if self.version != step - 1:
            self._publish(step - 1)
        self._request(iteration, step - 1)

    def positions(self, iteration: int) -> list[int]:
        """See `AnswerSource`."""
        return self.assigned[iteration]

    def more(self, count: int) -> list[int]:
        """See `AnswerSource`."""
        first = self.next_position
        self.next_position += count
        return list(range(first, self.next_position))

    def answer(self, positions: Sequence[int], step: int) -> list[list[Rollout]]:
        """See `AnswerSource`."""
        self.context.progress.enter("generation")

        def collect() -> list[list[Rollout]]:
            exchange = self.exchange
            assert exchange is not None
            missing = [each for each in positions if each not in self._requested]
            self._post(exchange, missing)
            return [self._group(exchange, position, step) for position in positions]

        return broadcast_decision(self.world, self._reported(collect), leads=self.leads)

    def end(self, iteration: int) -> None:
        """See `AnswerSource`."""
        self.assigned.pop(iteration, None)

    def saved(self) -> None:
        """See `AnswerSource`: rollout ranks may remove their files of the iteration."""
        if self.exchange is not None:
            waiting = [each for positions in self.assigned.values() for each in positions]
            self.exchange.set_oldest(min(waiting, default=self.next_position))

    def updated(self, step: int) -> None:
        """See `AnswerSource`."""
        if self.options.staleness.max and step < self.context.run.train.steps:
            self._publish(step)
            self._request(step // self.options.updates_per_step, step)

    def state(self) -> dict[str, Any]:
        """See `AnswerSource`."""
        assigned = [[iteration, positions] for iteration, positions in self.assigned.items()]
        return {"next_position": self.next_position, "assigned": assigned}

    def restore(self, state: dict[str, Any]) -> None:
        """See `AnswerSource`."""
        self.next_position = int(state["next_position"])
        self.assigned = {int(iteration): list(at) for iteration, at in state.get("assigned", [])}

    def _publish(self, version: int) -> None:
        """Send the trained weights to all rollout ranks. Collective."""
        self.context.progress.enter("weight_sync")
        if self.exchange is not None:
            self.exchange.set_version(version)
        dtype = DTYPES[self.context.run.plan.precision]
        weights = full_weights(self.context, self._targets)
        if self.link is not None:
            self.link.send(weights, dtype)
        else:
            for _ in weights:  # the gathering is collective
                pass
        self.version = version

    def _request(self, iteration: int, version: int) -> None:
        """Request all iterations from `iteration` on that may begin with weights `version`."""
        updates, stale = self.options.updates_per_step, self.options.staleness.max
        last = min(self._iterations - 1, (version + stale) // updates)
        for number in range(iteration, last + 1):
            if number in self.stored or number * updates < version:  # its answers are here
                continue
            if number not in self.assigned:
                self.assigned[number] = self.more(self.options.prompts_per_step)
            if self.exchange is not None:
                missing = [at for at in self.assigned[number] if at not in self._requested]
                self._post(self.exchange, missing)

    def _post(self, exchange: Exchange, positions: Sequence[int]) -> None:
        if self._earlier is None:
            first = self.world.size
            ranks = range(first, first + self.options.rollout.separate_devices)
            self._earlier = exchange.earlier(ranks, lambda: None)
        exchange.post(each for each in positions if each not in self._earlier)
        self._requested.update(positions)

    def _group(self, exchange: Exchange, position: int, step: int) -> list[Rollout]:
        """A group that is fresh enough; an earlier attempt's may not be."""
        for _ in range(2):
            group = parse_group(exchange.group(position, lambda: None))
            oldest = min(oldest_version(each) for each in group)
            newest = max(max(each.token_versions or [each.weight_version]) for each in group)
            if step - 1 - self.options.staleness.max <= oldest and newest <= step - 1:
                break
            exchange.post([position])
        for each in group:
            each.step = step
        self._requested.discard(position)
        return group

    def _reported(self, act: Any) -> Any:
        """`act`, with a rollout rank's error as this rank's."""

        def acting() -> Any:
            try:
                return act()
            except RolloutRankError as error:
                raise _CLASSES.get(error.exit_class, OSError)(str(error)) from None

        return acting
