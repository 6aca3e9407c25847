"""Reward models by Bradley-Terry on pairs; `loss` is the mean over pairs.

The reward of an answer is the scalar head's output at its last token. Shapes: B batch, S positions,
N answers, P pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.contracts.specs.finetuning.objectives import RewardBody
from workers.training.data.rows import Row
from workers.training.objectives import preference_losses as losses
from workers.training.objectives.calibration import BINS, calibration, reliability_sums
from workers.training.objectives.objective import Objective
from workers.training.objectives.segments import answers_of, pairs_of, value_at_end
from workers.training.parallel.batch_sharding import Batch
from workers.training.parallel.mesh import Axis


class Reward(Objective):
    """A row's pairs have one loss each: -log sigmoid of the difference of their rewards."""

    means = ("accuracy", "margin", "chosen", "rejected")
    metrics = (*(f"reward/{name}" for name in means), *(f"bins/{n}" for n in range(3 * BINS)))

    def __init__(self, options: RewardBody, context_axis: Axis, *, fused: bool = True) -> None:
        super().__init__(fused=fused)
        self.options, self.axis = options, context_axis
        self.repeated = context_axis.size

    def count(self, row: Row) -> float:
        """The row's number of pairs."""
        return float(len({each.pair for each in row.segments}))

    def from_logits(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """The sum of each row's pair losses, `[B]`, from scores `[B, S, 1]`."""
        sharded: Any = logits_BSV
        scores = sharded.to_local() if hasattr(logits_BSV, "to_local") else logits_BSV
        scores_BS = scores.squeeze(-1).float()
        answers = answers_of(batch.rows)
        rewards_N = value_at_end(scores_BS, answers, batch, self.axis)
        chosen, rejected, rows = pairs_of(answers, scores_BS.device)
        margins = torch.tensor([each.segment.margin for each in answers]).to(rewards_N)[chosen]
        difference = rewards_N[chosen] - rewards_N[rejected]
        losses_P = losses.bradley_terry(difference, margins if self.options.margin else 0.0)
        self.add(
            [
                (difference > 0).sum(),
                difference.sum(),
                rewards_N[chosen].sum(),
                rewards_N[rejected].sum(),
                *reliability_sums(difference.detach()),
            ]
        )
        # without pairs the loss still depends on the model
        return (0.0 * scores_BS.sum(dim=1)).index_add(0, rows, losses_P)

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """Means over pairs: the share whose chosen answer has the higher reward, and rewards."""
        return {
            f"reward/{name}": total / count for name, total in zip(self.means, sums, strict=False)
        }

    def validation_values(
        self, loss: float, sums: list[float], *, count: float
    ) -> dict[str, float]:
        """`val_loss`, means, and how far confidences are from the share of right pairs."""
        values = self.values(sums, count=count) | calibration(sums[len(self.means) :])
        return {"val_loss": loss} | {f"val_{name}": value for name, value in values.items()}
