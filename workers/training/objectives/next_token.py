"""Next-token prediction: the mean cross-entropy of a step's targets, weighted by their rows.

The objective of pre-training, where every target counts, and of supervised fine-tuning, where only
answers do. Does not depend on how weights are chosen.
"""

from __future__ import annotations

import math

from torch import Tensor

from workers.training.data.rows import Row
from workers.training.objectives.objective import TokenObjective
from workers.training.parallel.batch_sharding import Batch


class NextToken(TokenObjective):
    """`loss` is the sum of weighted token losses over the sum of weights."""

    sums_tokens = True

    def __init__(self, *, reports_count: bool, fused: bool = True) -> None:
        """`reports_count`: record the sum of a step's weights as the metric `trained_tokens`."""
        super().__init__(fused=fused)
        self.reports_count = reports_count

    def count(self, row: Row) -> float:
        """The sum of the row's weights."""
        return float(row.weights.sum(dtype="float64"))

    def from_token_losses(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """Weighted losses, `[B, S]`."""
        return losses_BS if batch.weights is None else losses_BS * batch.weights

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """The step's number of trained tokens, if requested."""
        return {"trained_tokens": count} if self.reports_count else {}

    def validation_values(
        self, loss: float, sums: list[float], *, count: float
    ) -> dict[str, float]:
        """`val_loss` and `val_perplexity`."""
        return {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
