"""An update that runs on the host, part by part: while one part is computed, its neighbours'
numbers travel.

ZeRO-Offload (arXiv 2101.06840): states and update on the CPU. ZeRO-Infinity (arXiv 2104.07857):
states on a disk.
Any update rule that looks at one parameter at a time; does not know which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.training.offload.copies import HostCopies
from workers.training.offload.disk import Disk
from workers.training.offload.states import StatesOnDisk
from workers.training.optim.zero1 import Groups, Make, hand_down, share_of

_PARTS = 16  # of a model: a few in flight at a time are a small share of it
_LEAST, _MOST = 1 << 14, 1 << 24  # numbers in a part: less is all overhead, more hides no more


class OffloadedOptimizer(Optimizer):
    """Rules made by `make`, one for each part of `groups`, over masters in host memory; states
    there or on `disk`.

    A parameter is in one part wholly. Parts are the same on all ranks that share DTensors.
    """

    def __init__(self, groups: Groups, make: Make, *, disk: Disk | None = None) -> None:
        parameters = [each for group in groups for each in group["params"]]
        self.disk = disk
        self.copies = HostCopies(parameters, keep=disk is None)
        self.parts = [_Part(part, make, self.copies, disk) for part in _cut(groups)]
        super().__init__(groups, dict(self.parts[0].rule.defaults))

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """By the model's parameters, in host memory or over the disk's file: what is written to
        them counts.
        """
        return {
            parameter: entry for part in self.parts for parameter, entry in part.states().items()
        }

    @property
    def takes_factor(self) -> bool:
        """Gradients that travel before the norm is known are clipped and unscaled where they
        arrive.
        """
        return self.copies.apart

    def follow(self, final: bool) -> None:
        """What the next backward pass makes of gradients is `final`, or will be added to, or summed
        over ranks.
        """
        self.copies.follows = final

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.copies.forget()

    @torch.no_grad()
    def step(self, closure: None = None, *, factor: float = 1.0) -> None:  # type: ignore[override]
        """`factor` multiplies gradients first, where it `takes_factor`."""
        for part in self.parts:
            hand_down(self.param_groups, part.rule.param_groups)
        self.parts[0].expect()
        for part, following in zip(self.parts, [*self.parts[1:], None], strict=True):
            if following is not None:
                following.expect()
            part.update(factor)
        self.copies.settle()
        if self.disk is not None:
            self.disk.settle()

    @property
    def masters(self) -> list[Tensor]:
        """Copies of the device's weights that stay in host memory."""
        return self.copies.held

    def close(self) -> None:
        """Give the disk's space back."""
        if self.disk is not None:
            self.disk.close()


class _Part:
    """Some parameters, with the rule that updates them and what it needs on its way."""

    def __init__(self, groups: Groups, make: Make, copies: HostCopies, disk: Disk | None) -> None:
        self.copies = copies
        self.parameters = [each for group in groups for each in group["params"]]
        self.rule = make(
            [
                {**group, "params": [copies.host(each) for each in group["params"]]}
                for group in groups
            ]
        )
        self.on_disk = None if disk is None else StatesOnDisk(self.rule, disk)
        self._copied: torch.Event | None = None

    def expect(self) -> None:
        self._copied = self.copies.fetch(self.parameters)
        if self.on_disk:
            self.on_disk.expect()

    def update(self, factor: float) -> None:
        if self.on_disk:
            self.on_disk.take()
        self.copies.arrive(self.parameters, self._copied, factor=factor)
        self.rule.step()
        self.copies.give_back(self.parameters)
        if self.on_disk:
            self.on_disk.put()

    def states(self) -> dict[Tensor, dict[str, Any]]:
        held = self.on_disk.mapped() if self.on_disk else self.rule.state
        hosts = ((each, self.copies.host(each)) for each in self.parameters)
        return {each: held[host] for each, host in hosts if host in held}


def _cut(groups: Groups) -> list[Groups]:
    """Parts in the order of parameters, each with a group for every group; at least one part."""
    sizes = [share_of(each) for group in groups for each in group["params"]]
    limit = max(_LEAST, min(_MOST, sum(sizes) // _PARTS))
    parts: list[Groups] = []
    held = limit
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            size = share_of(parameter)
            if not parts or held + size > limit:
                parts.append([{**each, "params": []} for each in groups])
                held = 0
            parts[-1][index]["params"].append(parameter)
            held += size
    return parts or [[{**each, "params": []} for each in groups]]
