"""An optimizer that updates on the host, part by part, while neighboring parts are transferred.

ZeRO-Offload (arXiv 2101.06840): states and update on the CPU. ZeRO-Infinity (arXiv 2104.07857):
states on a disk. Works with any rule that updates one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.training.offload.copies import HostCopies
from workers.training.offload.disk import Disk
from workers.training.offload.states import StatesOnDisk
from workers.training.optim.zero1 import Groups, Make, copy_group_options, elements_per_rank

_PARTS = 16  # per model: the few in flight are a small share of it
# numbers per part: smaller parts are mostly overhead, larger ones do not hide more
_MIN_NUMBERS, _MAX_NUMBERS = 1 << 14, 1 << 24


class OffloadedOptimizer(Optimizer):
    """Rules made by `make`, one per part of `groups`, over host masters; states there or on `disk`.

    A parameter is entirely in one part. Parts are the same on all ranks that share DTensors.
    Updates use `threads` of the host; None: as many as the rest of the process.
    """

    def __init__(
        self, groups: Groups, make: Make, *, disk: Disk | None = None, threads: int | None = None
    ) -> None:
        parameters = [each for group in groups for each in group["params"]]
        self.disk, self.threads = disk, threads
        self.copies = HostCopies(parameters, keep_masters=disk is None)
        self.parts = [_Part(part, make, self.copies, disk) for part in _split_groups(groups)]
        super().__init__(groups, dict(self.parts[0].rule.defaults))

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """State by model parameter, in host memory or over the disk's file; writes to it take
        effect.
        """
        return {
            parameter: entry for part in self.parts for parameter, entry in part.states().items()
        }

    @property
    def accepts_factor(self) -> bool:
        """Whether the update clips and unscales: gradients are copied before the norm is known."""
        return self.copies.has_copies

    @property
    def skips_on_device(self) -> bool:
        """False: the host updates, so it has to know."""
        return False

    def set_gradients_final(self, final: bool) -> None:
        """Declare whether the next backward pass's gradients stay unchanged until the update."""
        self.copies.copies_early = final

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and their host copies."""
        super().zero_grad(set_to_none)
        self.copies.drop_gradients()

    @torch.no_grad()
    def step(self, closure: None = None, *, factor: float = 1.0) -> None:  # type: ignore[override]
        """Update part by part; `factor` multiplies gradients first if `accepts_factor`."""
        for part in self.parts:
            copy_group_options(self.param_groups, part.rule.param_groups)
        self.parts[0].start_transfers()
        with _threads(self.threads):
            for part, following in zip(self.parts, [*self.parts[1:], None], strict=True):
                if following is not None:
                    following.start_transfers()
                part.update(factor)
        self.copies.wait_for_return()
        if self.disk is not None:
            self.disk.wait()

    @property
    def masters(self) -> list[Tensor]:
        """Host copies of device weights."""
        return self.copies.masters

    def close(self) -> None:
        """Free the disk's space."""
        if self.disk is not None:
            self.disk.close()


class _Part:
    """Some parameters with their rule and transfers."""

    def __init__(self, groups: Groups, make: Make, copies: HostCopies, disk: Disk | None) -> None:
        self.copies = copies
        self.parameters = [each for group in groups for each in group["params"]]
        self.rule = make(
            [
                {**group, "params": [copies.host_tensor(each) for each in group["params"]]}
                for group in groups
            ]
        )
        self.on_disk = None if disk is None else StatesOnDisk(self.rule, disk)
        self._copied: torch.Event | None = None

    def start_transfers(self) -> None:
        self._copied = self.copies.start_fetch(self.parameters)
        if self.on_disk:
            self.on_disk.start_read()

    def update(self, factor: float) -> None:
        if self.on_disk:
            self.on_disk.finish_read()
        self.copies.finish_fetch(self.parameters, self._copied, factor=factor)
        self.rule.step()
        self.copies.start_return(self.parameters)
        if self.on_disk:
            self.on_disk.start_write()

    def states(self) -> dict[Tensor, dict[str, Any]]:
        states = self.on_disk.mapped() if self.on_disk else self.rule.state
        hosts = ((each, self.copies.host_tensor(each)) for each in self.parameters)
        return {each: states[host] for each, host in hosts if host in states}


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Use `number` threads per operation on the host."""
    before = torch.get_num_threads()
    if number in (None, before):
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _split_groups(groups: Groups) -> list[Groups]:
    """Parts in parameter order, each with one group per input group; at least one part."""
    sizes = [elements_per_rank(each) for group in groups for each in group["params"]]
    limit = max(_MIN_NUMBERS, min(_MAX_NUMBERS, sum(sizes) // _PARTS))
    parts: list[Groups] = []
    part_size = limit
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            size = elements_per_rank(parameter)
            if not parts or part_size + size > limit:
                parts.append([{**each, "params": []} for each in groups])
                part_size = 0
            parts[-1][index]["params"].append(parameter)
            part_size += size
    return parts or [[{**each, "params": []} for each in groups]]
