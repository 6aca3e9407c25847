"""Objective: from a model's outputs to losses per row and named metrics.

Under every plan an objective sees a micro-batch's outputs at this rank's positions. Does not depend
on how micro-batches run. Shapes: B batch, S positions of this rank, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.training.data.rows import Row, RowSource
from workers.training.objectives.token_losses import token_losses
from workers.training.parallel.batch_sharding import Batch, Reference


class Passes(Protocol):
    """What an objective may ask of the model before a step. Collective."""

    def measure(self, rows: RowSource, count: int) -> list[float]:
        """Forward passes over rows: the sum of losses and of metrics over all ranks."""
        ...

    def answers(
        self, prompts: Sequence[Sequence[int]], first: int, *, max_tokens: int, temperature: float
    ) -> list[list[int]]:
        """What the model writes after the prompts of the global batch from sample `first` on."""
        ...


class Objective(ABC):
    """Losses are sums; a step divides them by the sum of `count` over its rows on all ranks.

    `metrics` names numbers that `add` sums over a step. With `sums_tokens` only the sum of the
    targets' cross-entropy is needed. With `reads_reference` a micro-batch has the outputs of the
    frozen module, if there is one. `repeated` is the number of ranks with the same losses.
    """

    metrics: tuple[str, ...] = ()
    sums_tokens = False
    reads_reference = True
    repeated = 1

    def __init__(self, *, fused: bool = True) -> None:
        self.fused = fused
        self._sums: Tensor | None = None

    @abstractmethod
    def count(self, row: Row) -> float:
        """How much a row adds to the divisor of the step's losses."""

    def prepare(self, passes: Passes, samples: RowSource, first: int, count: int) -> None:
        """Before the passes of the `count` samples from `first` on: what depends on all of them."""
        return

    @abstractmethod
    def from_logits(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """Losses `[B]` or `[B, S]` from logits, which it may overwrite."""

    def reference_of(self, logits_BSV: Tensor, batch: Batch) -> Reference:
        """What it needs of a frozen module, from its logits: the cross-entropy of each target."""
        return token_losses(logits_BSV, batch.targets, fused=self.fused)

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """The metrics of a step from their sums over all ranks."""
        return {name: total / count for name, total in zip(self.metrics, sums, strict=True)}

    def validation_values(
        self, loss: float, sums: list[float], *, count: float
    ) -> dict[str, float]:
        """`val_loss` and the metrics of held-out data, named `val_…`."""
        metrics = self.values(sums, count=count)
        return {"val_loss": loss} | {f"val_{name}": value for name, value in metrics.items()}

    def add(self, numbers: list[Tensor]) -> None:
        """Add a micro-batch's metrics, one number for each of `metrics`."""
        added = torch.stack([each.detach().double() for each in numbers])
        self._sums = added if self._sums is None else self._sums + added

    def take(self, device: torch.device) -> Tensor:
        """This rank's sums since the last call, `[len(metrics)]` fp64; resets them."""
        taken, self._sums = self._sums, None
        if taken is None:
            return torch.zeros(len(self.metrics), dtype=torch.float64, device=device)
        return taken


class TokenObjective(Objective):
    """An objective that needs only the cross-entropy of each target, which the head may compute
    without full logits.
    """

    @abstractmethod
    def from_token_losses(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """Losses `[B]` or `[B, S]` from the cross-entropy of each target, 0 where it is IGNORED."""

    def from_logits(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """See `Objective`."""
        losses_BS = token_losses(logits_BSV, batch.targets, fused=self.fused)
        return self.from_token_losses(losses_BS, batch)
