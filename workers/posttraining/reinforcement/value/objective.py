"""The value model of PPO: its clipped squared error, a mean over all tokens of an update.

Rows carry returns and earlier values (`Row.values`). Does not hold the formulas (`policy_losses`).
Shapes: B batch, S positions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workers.contracts.specs.finetuning.reinforcement import PpoBody
from workers.training.data.rows import Row
from workers.training.objectives import policy_losses as losses
from workers.training.objectives.objective import Objective
from workers.training.parallel.batch_sharding import IGNORED, Batch

# names of `Row.values`: each token's return, and its value at the start of the iteration
RETURN, VALUE = "return", "value"


class Value(Objective):
    """The value of a token is the scalar head's output where the model predicts that token."""

    metrics = ("value_loss", "value/error", "value/clip_fraction", "value/mean")
    reads_reference = False

    def __init__(self, options: PpoBody) -> None:
        super().__init__()
        self.options = options

    def count(self, row: Row) -> float:
        """The row's trained tokens."""
        return float(row.weights.sum(dtype="float64"))

    def from_logits(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """Losses `[B, S]` from scores `[B, S, 1]`."""
        values = scores(logits_BSV)
        if not batch.rows:  # padding only
            return 0.0 * values
        trained = batch.targets != IGNORED
        old, returns = batch.values[VALUE], batch.values[RETURN]
        out, clipped = losses.clipped_value(values, old, returns, clip=self.options.clip.value)
        error = (values - returns) ** 2
        self.add([(each * trained).sum() for each in (out, error, clipped, values)])
        weighted = out if batch.weights is None else out * batch.weights
        return self.options.value.coef * weighted.masked_fill(~trained, 0.0)

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """Means over the step's trained tokens; `value/error` is the root of a mean square."""
        means = super().values(sums, count=count)
        return means | {"value/error": means["value/error"] ** 0.5}


def scores(logits_BSV: Tensor) -> Tensor:
    """The scalar head's outputs `[B, S]`, fp32, on every tensor-parallel rank."""
    sharded: Any = logits_BSV
    local = sharded.to_local() if hasattr(logits_BSV, "to_local") else logits_BSV
    values: Tensor = local.squeeze(-1).float()
    return values
