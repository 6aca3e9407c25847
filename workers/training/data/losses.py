"""The loss of each source, from sums that are reduced with a step's other numbers.

Does not depend on models or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.training.data.rows import RowSource
from workers.training.objectives.counts import Counts
from workers.training.parallel.batch_sharding import Microbatch


class SourceLosses:
    """Sums losses by source per step; their counts follow from the index, on every rank."""

    def __init__(self, samples: RowSource, counts: Counts, device: torch.device) -> None:
        self.samples, self.counts = samples, counts
        self.width = len(samples.names)
        self._sums = torch.zeros(self.width, dtype=torch.float64, device=device)

    def add(self, block: Microbatch, losses: Tensor) -> None:
        """Add this rank's summed losses of the block's rows, `[micro_batch_size]`."""
        sources = [self.samples.source(block.first + row) for row in range(block.count)]
        index = torch.tensor(sources, dtype=torch.int64, device=losses.device)
        self._sums.index_add_(0, index, losses.detach()[: block.count].double())

    def take(self) -> Tensor:
        """This rank's sums, `[width]`; resets them."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken

    def values(self, sums: list[float], *, first: int, count: int) -> dict[str, float]:
        """`loss/{source}` of the global batch of `count` samples from `first`; omits absent
        sources.
        """
        divisors = dict.fromkeys(range(self.width), 0.0)
        for index in range(first, first + count):
            divisors[self.samples.source(index)] += self.counts.of_sample(index)
        return {
            f"loss/{name}": sums[number] / divisors[number]
            for number, name in enumerate(self.samples.names)
            if divisors[number]
        }
