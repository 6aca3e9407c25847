"""Which module first made a number that is not finite: the step is done once more, with every
module watched.

Data and dropout are functions of the sample index, and the weights have not moved since, so the
second time is the
first again. Knows modules and ranks; does not know how a step goes through them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.metrics.memory import local_tensor
from workers.training.parallel.mesh import World

_BLOCK = re.compile(r"^blocks\.(\d+)(\.|$)")
_LAST = 1 << 30  # after every block: the final norm, the head, the decoder as a whole


@dataclass(frozen=True, slots=True)
class NonFiniteSource:
    """`module` by its name in the whole model; `what` of it was not finite: its output or its
    gradient; on `rank`.
    """

    module: str
    what: str
    rank: int


def find_non_finite(
    parts: Sequence[nn.Module], world: World, again: Callable[[], object]
) -> NonFiniteSource | None:
    """Run `again`, forward and backward over the step's batch, and name the first module whose
    output is not finite.

    If all outputs are, the first on the way back whose gradient is not (of its parameters, or what
    arrives at its
    output). Of several ranks' findings the earliest counts. None if every number was finite this
    time, which a sound
    device does not do. To be called on all ranks, gradients empty.
    """
    watch = _Watch()
    handles = [
        module.register_forward_hook(watch.hook(name))
        for part in parts
        for name, module in part.named_modules(remove_duplicate=True)
    ]
    try:
        again()
    finally:
        for handle in handles:
            handle.remove()
    for part in parts:
        watch.parameters(part)
    mine = [
        (*place, name, world.rank) for place, name in (watch.first_output(), watch.first_gradient())
    ]
    return _earliest(_of_all_ranks(mine, world))


def _earliest(found: list[list[tuple[int, int, str, int]]]) -> NonFiniteSource | None:
    """Forward the smallest place counts, backward the largest; an empty name is none."""
    forward = [each for each, _ in found if each[2]]
    if forward:
        *_, module, rank = min(forward)
        return NonFiniteSource(module, "output", rank)
    backward = [each for _, each in found if each[2]]
    if not backward:
        return None
    *_, module, rank = max(backward, key=lambda each: each[:2])
    return NonFiniteSource(module, "gradient", rank)


def _of_all_ranks(mine: Any, world: World) -> list[Any]:
    found: list[Any] = [mine]
    if world.size > 1:
        found = [None] * world.size
        dist.all_gather_object(found, mine)
    return found


@dataclass(slots=True)
class _Watch:
    """Places in forward order: the block's number, then the order in which this rank's modules
    finished.
    """

    order: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    gradients: set[str] = field(default_factory=set)

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        name = name or "decoder"

        def finished(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            self.order.setdefault(name, len(self.order))
            some = list(_tensors(output))
            if not all(_finite(each) for each in some) and not self.outputs:
                # between modules: the attention core, a sum
                inside = name if all(_finite(each) for each in _tensors(given)) else _parent(name)
                self.order.setdefault(inside, self.order[name])
                self.outputs[inside] = None
            for each in some:
                if each.requires_grad:
                    each.register_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

        return finished

    def parameters(self, part: nn.Module) -> None:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None and not _finite(parameter.grad):
                self.gradients.add(_parent(name))

    def first_output(self) -> tuple[tuple[int, int], str]:
        return min(((self._place(name), name) for name in self.outputs), default=((0, 0), ""))

    def first_gradient(self) -> tuple[tuple[int, int], str]:
        return max(((self._place(name), name) for name in self.gradients), default=((0, 0), ""))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if not _finite(gradient):
            self.gradients.add(name)

    def _place(self, name: str) -> tuple[int, int]:
        block = _BLOCK.match(name)
        group = int(block[1]) if block else -1 if name in ("embed", "positions") else _LAST
        return group, self.order.get(name, 0)


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or "decoder"


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a module's arguments or result."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(tensor)).all())
