"""Named numbers summed over all ranks in one all-reduce at the end of a step.

On CUDA the host waits for nothing but the sums: its own numbers are uploaded together, and the sums
are copied to the host as soon as the device has them. Does not depend on what the numbers mean.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
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
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None

    def put(self, name: str, values: Tensor | list[float] | float) -> None:
        """Add this rank's numbers, of any shape; a single number is a list of one."""
        self._parts[name] = torch.as_tensor(values, dtype=torch.float64).reshape(-1)

    def send(self) -> None:
        """Start the all-reduce without waiting."""
        self._flat = torch.cat(self._on_device())
        self._work = dist.all_reduce(self._flat, async_op=True) if self.world.size > 1 else None
        self._sent = True
        if self.world.device.type == "cuda":
            self._wait()  # of the stream, not of the host
            host = torch.empty(self._flat.shape, dtype=torch.float64, pin_memory=True)
            host.copy_(self._flat, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied = host, copied

    def on_device(self, name: str) -> Tensor:
        """The sums of one name on the device, for a decision that the host does not wait for."""
        self._wait()
        return self._flat[slice(*self._places()[name])]

    def total(self) -> dict[str, list[float]]:
        """The sums over all ranks, by name."""
        if not self._sent:
            self.send()
        if self._copied is not None:
            summed, copied = self._copied
            copied.synchronize()  # later work on the stream continues
        else:
            self._wait()
            summed = self._flat
        numbers: list[float] = summed.tolist()
        return {name: numbers[slice(*place)] for name, place in self._places().items()}

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _places(self) -> dict[str, tuple[int, int]]:
        """`{name: (first, end)}` in the flat tensor."""
        bounds = accumulate((part.numel() for part in self._parts.values()), initial=0)
        return dict(zip(self._parts, pairwise(bounds), strict=True))

    def _on_device(self) -> list[Tensor]:
        """All numbers in order; those of the host in one upload."""
        parts, device = list(self._parts.values()), self.world.device
        if device.type != "cuda":
            return parts
        hosted = [part for part in parts if part.device.type == "cpu"]
        if not hosted:
            return parts
        uploaded = torch.cat(hosted).pin_memory().to(device, non_blocking=True)
        split = iter(torch.split(uploaded, [part.numel() for part in hosted]))
        return [next(split) if part.device.type == "cpu" else part for part in parts]
