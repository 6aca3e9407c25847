"""Rollouts as rows by global sample index: each answer is a row, in the order of the updates.

Does not depend on how rollouts are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PolicyBody
from workers.models.initialize import derived_seed
from workers.posttraining.reinforcement.rollouts import Rollout
from workers.posttraining.reinforcement.value.objective import RETURN, VALUE
from workers.training.data.rows import Row
from workers.training.objectives.policy import ADVANTAGE, OLD, REFERENCE, SAMPLER

Floats = NDArray[np.float32]


@dataclass(slots=True)
class RolloutRows:
    """A `RowSource` of the current iteration; with several updates its rows are shuffled."""

    options: PolicyBody
    seq_len: int
    seed: int
    names: list[str] = field(default_factory=lambda: ["rollouts"])
    masked: bool = False
    uniform: bool = False
    iteration: int = -1
    rollouts: Sequence[Rollout] = ()
    windows: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # rows of an iteration over all its epochs
        self.windows = self.options.answers_per_step * self.options.epochs

    def iteration_of(self, index: int) -> int:
        """The iteration of global sample `index`."""
        return index // self.windows

    def fill(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Replace the rows by those of `iteration`."""
        self.iteration, self.rollouts = iteration, rollouts
        self._orders.clear()

    def source(self, index: int) -> int:
        """There is one source."""
        return 0

    def row(self, index: int) -> Row:
        """Global sample `index`, which must be of the current iteration."""
        iteration, within = divmod(index, self.windows)
        if iteration != self.iteration:
            raise IndexError(f"sample {index} is of iteration {iteration}, not {self.iteration}")
        epoch, position = divmod(within, self.options.answers_per_step)
        return self.answer_row(self._order(epoch)[position])

    def length(self, index: int) -> int:
        """Positions of global sample `index` before its padding."""
        epoch, position = divmod(index % self.windows, self.options.answers_per_step)
        return self.positions(self._order(epoch)[position])

    def answer_row(self, number: int) -> Row:
        """The row of answer `number` of the iteration."""
        rollout = self.rollouts[number]
        span = self.span(number)
        ids, weights = self._frame(rollout, span)
        values = {
            ADVANTAGE: self._spread(span, rollout.advantages or rollout.advantage),
            SAMPLER: self._spread(span, rollout.logprobs),
        }
        optional = (
            (OLD, rollout.old_logprobs),
            (REFERENCE, rollout.reference_logprobs),
            (VALUE, rollout.values),
            (RETURN, rollout.returns),
        )
        for name, stored in optional:
            if stored is not None:
                values[name] = self._spread(span, stored)
        return Row(ids, weights, values=values)

    def span(self, number: int) -> slice:
        """The positions of an answer's targets."""
        rollout = self.rollouts[number]
        first = len(rollout.prompt_ids) - 1
        return slice(first, first + len(rollout.token_ids))

    def positions(self, number: int) -> int:
        """Positions of an answer's row before its padding."""
        rollout = self.rollouts[number]
        return len(rollout.prompt_ids) - 1 + len(rollout.token_ids)

    def _frame(self, rollout: Rollout, span: slice) -> tuple[NDArray[np.int64], Floats]:
        prompt, answer = len(rollout.prompt_ids), len(rollout.token_ids)
        ids = np.zeros(self.seq_len + 1, dtype=np.int64)
        ids[:prompt] = rollout.prompt_ids
        ids[prompt : prompt + answer] = rollout.token_ids
        weights = np.zeros(self.seq_len, dtype=np.float32)
        if not rollout.failure:
            weights[span] = self._weight(answer)
        return ids, weights

    def _weight(self, tokens: int) -> float:
        if self.options.averages_tokens:
            return 1.0
        if isinstance(self.options, GrpoBody) and self.options.algorithm == "dr_grpo":
            return 1.0 / self.options.rollout.max_new_tokens
        return 1.0 / tokens

    def _spread(self, span: slice, values: float | Sequence[float]) -> Floats:
        out = np.zeros(self.seq_len, dtype=np.float32)
        out[span] = values
        return out

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            count = len(self.rollouts)
            order = list(range(count))
            if self.options.updates_per_step > 1:
                seed = derived_seed(self.seed, "rows", self.iteration, epoch)
                order = np.random.default_rng(seed).permutation(count).tolist()
            # within an update, rows of similar length share a micro-batch: ranks take equally long
            size = self.options.rows_per_update
            self._orders[epoch] = [
                number
                for first in range(0, count, size)
                for number in sorted(order[first : first + size], key=self.positions)
            ]
        return self._orders[epoch]


class AnswerRows:
    """A `RowSource` of an iteration's answers in their own order."""

    def __init__(self, rows: RolloutRows) -> None:
        self.rows = rows
        self.seq_len, self.names, self.windows = rows.seq_len, rows.names, len(rows.rollouts)
        self.masked = self.uniform = False

    def source(self, index: int) -> int:
        """There is one source."""
        return 0

    def row(self, index: int) -> Row:
        """Answer `index`."""
        return self.rows.answer_row(index)

    def length(self, index: int) -> int:
        """Positions of answer `index` before its padding."""
        return self.rows.positions(index)
