"""KTO: preference optimization on answers labelled good or bad; `loss` is the mean over answers.

Does not hold the formula (`preference_losses`). Shapes: B batch, S positions, N answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.contracts.specs.finetuning.objectives import DpoBody
from workers.training.data.mismatched_pairs import MismatchedPairs
from workers.training.data.rows import Row, RowSource
from workers.training.objectives import preference_losses as losses
from workers.training.objectives.objective import Passes, TokenObjective
from workers.training.objectives.segments import answers_of, sum_by_answer
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.mesh import Axis


class KtoObjective(TokenObjective):
    """An answer's log-ratio to the reference is compared with the point z of its batch.

    z is the mean log-ratio of the batch's prompts with each other's answers, over all ranks, at
    least 0 and without gradient (arXiv 2402.01306, section 4.1; the pairing of TRL).
    """

    metrics = (
        "reward_good",
        "good",
        "reward_bad",
        "bad",
        "logp_good",
        "logp_bad",
    )

    def __init__(self, options: DpoBody, context_axis: Axis, *, fused: bool = True) -> None:
        super().__init__(fused=fused)
        self.options, self.axis = options, context_axis
        self.repeated = context_axis.size
        self.z = 0.0
        self._measures = False

    def count(self, row: Row) -> float:
        """The row's number of answers."""
        return float(len(row.segments))

    def prepare(self, passes: Passes, samples: RowSource, first: int, count: int) -> None:
        """Compute z of a batch by forward passes of both models over shifted answers."""
        shifted = MismatchedPairs(samples, first=first, count=count)
        self._measures = True
        try:
            total, *_ = passes.measure(shifted, shifted.windows)
        finally:
            self._measures = False
        self.z = max(0.0, total / shifted.windows)

    def from_token_losses(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """The sum of each row's answer losses, `[B]`."""
        assert isinstance(batch.reference, Tensor)
        answers = answers_of(batch.rows)
        logp_N = -sum_by_answer(losses_BS, answers, batch, self.axis)
        ratio_N = logp_N + sum_by_answer(batch.reference, answers, batch, self.axis)
        good_N = torch.tensor([each.segment.role == "good" for each in answers], dtype=torch.bool)
        good_N = good_N.to(losses_BS.device)
        rows_N = torch.tensor([each.row for each in answers], dtype=torch.int64)
        rows_N = rows_N.to(losses_BS.device)
        if self._measures:
            each_N = ratio_N
        else:
            good, bad = self.options.weights
            weights_N = torch.where(good_N, good, bad)
            each_N = losses.kto(ratio_N, good_N, z=self.z, beta=self.options.beta) * weights_N
            self._add_metrics(self.options.beta * ratio_N, logp_N, good_N)
        # without answers the loss still depends on the model
        return (0.0 * losses_BS.sum(dim=1)).index_add(0, rows_N, each_N)

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """Means over the good and over the bad answers, and z; omits a kind without answers."""
        reward_good, good, reward_bad, bad, logp_good, logp_bad = sums
        values = {"dpo/kl": self.z}
        if good:
            values |= {"dpo/reward_chosen": reward_good / good, "dpo/logp_chosen": logp_good / good}
        if bad:
            values |= {"dpo/reward_rejected": reward_bad / bad, "dpo/logp_rejected": logp_bad / bad}
        if good and bad:
            values["dpo/margin"] = reward_good / good - reward_bad / bad
        return values

    def _add_metrics(self, rewards_N: Tensor, logp_N: Tensor, good_N: Tensor) -> None:
        bad_N = ~good_N
        self.add(
            [
                rewards_N[good_N].sum(),
                good_N.sum(),
                rewards_N[bad_N].sum(),
                bad_N.sum(),
                logp_N[good_N].sum(),
                logp_N[bad_N].sum(),
            ]
        )
