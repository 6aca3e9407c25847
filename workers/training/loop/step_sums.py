"""Named numbers summed over all ranks in one all-reduce at the end of a step.

Does not depend on what the numbers mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.parallel.mesh import World


class Sums:
    """`put` values by name, in the same order on every rank; `total` reduces them all at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._parts: dict[str, Tensor] = {}
        self._flat = torch.empty(0)
        self._work: Any = None
        self._sent = False

    def put(self, name: str, values: Tensor | list[float] | float) -> None:
        """Add this rank's numbers, of any shape; a single number is a list of one."""
        flat = torch.as_tensor(values, dtype=torch.float64).reshape(-1)
        self._parts[name] = flat.to(self.world.device)

    def send(self) -> None:
        """Start the all-reduce without waiting."""
        self._flat = torch.cat(list(self._parts.values()))
        self._work = dist.all_reduce(self._flat, async_op=True) if self.world.size > 1 else None
        self._sent = True

    def total(self) -> dict[str, list[float]]:
        """The sums over all ranks, by name."""
        if not self._sent:
            self.send()
        if self._work is not None:
            self._work.wait()
        summed: list[float] = self._flat.tolist()
        sums, start = {}, 0
        for name, part in self._parts.items():
            sums[name] = summed[start : start + part.numel()]
            start += part.numel()
        return sums
