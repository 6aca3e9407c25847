"""Preference optimization on pairs: DPO and its family; `loss` is the mean over pairs.

Does not hold the formulas (`preference_losses`). Shapes: B batch, S positions, N answers, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.contracts.specs.finetuning.objectives import DpoBody
from workers.training.data.rows import Row
from workers.training.objectives import preference_losses as losses
from workers.training.objectives.objective import TokenObjective
from workers.training.objectives.segments import answers_of, pairs_of, sum_by_answer
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.mesh import Axis


class Preference(TokenObjective):
    """A row's pairs of segments have one loss each.

    The reward of an answer is beta times its log-ratio to the reference, or without reference beta
    times its mean log-probability; a pair's margin is the difference of its rewards.
    """

    metrics = (
        "dpo/margin",
        "dpo/accuracy",
        "dpo/reward_chosen",
        "dpo/reward_rejected",
        "dpo/logp_chosen",
        "dpo/logp_rejected",
    )

    def __init__(self, options: DpoBody, context_axis: Axis, *, fused: bool = True) -> None:
        super().__init__(fused=fused)
        self.options, self.axis = options, context_axis
        self.repeated = context_axis.size

    def count(self, row: Row) -> float:
        """The row's number of pairs."""
        return float(len({each.pair for each in row.segments}))

    def from_token_losses(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """The sum of each row's pair losses, `[B]`."""
        answers = answers_of(batch.rows)
        logp_N = -sum_by_answer(losses_BS, answers, batch, self.axis)
        tokens_N = torch.tensor([max(1, each.tokens) for each in answers]).to(logp_N)
        chosen, rejected, rows = pairs_of(answers, losses_BS.device)
        ratio_N = logp_N / tokens_N
        if self.options.needs_reference:
            assert isinstance(batch.reference, Tensor)
            ratio_N = logp_N + sum_by_answer(batch.reference, answers, batch, self.axis)
        losses_P = self._losses(ratio_N, tokens_N, chosen, rejected)
        self._add_metrics(self.options.beta * ratio_N, logp_N, chosen, rejected)
        # without pairs the loss still depends on the model
        return (0.0 * losses_BS.sum(dim=1)).index_add(0, rows, losses_P)

    def _losses(
        self, ratio_N: Tensor, tokens_N: Tensor, chosen: Tensor, rejected: Tensor
    ) -> Tensor:
        """`[P]`; without reference `ratio_N` are mean log-probabilities."""
        options, beta = self.options, self.options.beta
        better, worse = ratio_N[chosen], ratio_N[rejected]
        d = better - worse
        if options.loss == "dpo":
            return losses.dpo(d, beta=beta)
        if options.loss == "cdpo":
            return losses.cdpo(d, beta=beta, label_smoothing=options.smoothing)
        if options.loss == "hinge":
            return losses.hinge(d, beta=beta)
        if options.loss == "ipo":
            mean_d = better / tokens_N[chosen] - worse / tokens_N[rejected]
            return losses.ipo(mean_d, beta=beta)
        if options.loss == "simpo":
            return losses.simpo(better, worse, beta=beta, gamma=options.target_margin)
        return losses.orpo(better, worse, beta=beta)

    def _add_metrics(
        self, rewards_N: Tensor, logp_N: Tensor, chosen: Tensor, rejected: Tensor
    ) -> None:
        margins = rewards_N[chosen] - rewards_N[rejected]
        self.add(
            [
                margins.sum(),
                (margins > 0).sum(),
                rewards_N[chosen].sum(),
                rewards_N[rejected].sum(),
                logp_N[chosen].sum(),
                logp_N[rejected].sum(),
            ]
        )
