"""The loss of each source, from sums that are reduced with a step's other numbers.

Does not depend on models or ranks.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from workers.training.data.samples import Samples
from workers.training.parallel.batch_sharding import Microbatch


class SourceLosses:
    """Sums token losses by source per step; token counts follow from the index, on every rank."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples = samples
        self.width = len(samples.names)
        self._sums = torch.zeros(self.width, dtype=torch.float64, device=device)

    def add(self, block: Microbatch, losses: Tensor) -> None:
        """Add this rank's summed token losses of the block's rows, `[micro_batch_size]`."""
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
        rows = Counter(self.samples.source(first + row) for row in range(count))
        return {
            f"loss/{name}": sums[number] / (rows[number] * self.samples.seq_len)
            for number, name in enumerate(self.samples.names)
            if rows[number]
        }
