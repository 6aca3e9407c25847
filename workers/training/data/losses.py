"""The loss of each source beside the whole, from sums that travel with a step's other numbers.

Knows samples and blocks; does not know models or ranks.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from workers.training.data.samples import Samples
from workers.training.parallel.batch_sharding import Microbatch


class SourceLosses:
    """Sums token losses by source over a step.

    How many tokens each had follows from the index, on every rank.
    """

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples = samples
        self.width = len(samples.names)
        self._sums = torch.zeros(self.width, dtype=torch.float64, device=device)

    def add(self, block: Microbatch, losses: Tensor) -> None:
        """Summed token losses of the block's rows, `[micro_batch_size]`, this rank's."""
        sources = [self.samples.source(block.first + row) for row in range(block.count)]
        index = torch.tensor(sources, dtype=torch.int64, device=losses.device)
        self._sums.index_add_(0, index, losses.detach()[: block.count].double())

    def take(self) -> Tensor:
        """This rank's sums, `[width]`, and start anew."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken

    def values(self, sums: list[float], *, first: int, count: int) -> dict[str, float]:
        """`loss/{source}` of the global batch of `count` samples from `first` on; none where it has
        no sample.
        """
        rows = Counter(self.samples.source(first + row) for row in range(count))
        return {
            f"loss/{name}": sums[number] / (rows[number] * self.samples.seq_len)
            for number, name in enumerate(self.samples.names)
            if rows[number]
        }
