"""Finds the module that first produced a non-finite number, by repeating the step with hooks.

Data and dropout are functions of the sample index, and the weights have not changed, so the step
repeats exactly. Does not depend on how a step runs through modules.
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
    """`module` by its name in the full model; `what`: its output or its gradient; on `rank`."""

    module: str
    what: str
    rank: int


def find_non_finite(
    parts: Sequence[nn.Module], world: World, repeat: Callable[[], object]
) -> NonFiniteSource | None:
    """Run `repeat`, forward and backward over the step's batch; return the first module whose
    output is not finite.

    If all outputs are finite: the first module of the backward pass with a non-finite gradient, of
    a parameter or at its output. The earliest of all ranks counts. None if every number was finite
    this time, which suggests a faulty device. Collective; gradients must be empty.
    """
    watch = _Watch()
    handles = [
        module.register_forward_hook(watch.hook(name))
        for part in parts
        for name, module in part.named_modules(remove_duplicate=True)
    ]
    try:
        repeat()
    finally:
        for handle in handles:
            handle.remove()
    for part in parts:
        watch.parameters(part)
    mine = [
        (*place, name, world.rank) for place, name in (watch.first_output(), watch.first_gradient())
    ]
    return _earliest(_gather(mine, world))


def _earliest(results: list[list[tuple[int, int, str, int]]]) -> NonFiniteSource | None:
    """The smallest position forward, else the largest backward; an empty name has no position."""
    forward = [each for each, _ in results if each[2]]
    if forward:
        *_, module, rank = min(forward)
        return NonFiniteSource(module, "output", rank)
    backward = [each for _, each in results if each[2]]
    if not backward:
        return None
    *_, module, rank = max(backward, key=lambda each: each[:2])
    return NonFiniteSource(module, "gradient", rank)


def _gather(mine: Any, world: World) -> list[Any]:
    results: list[Any] = [mine]
    if world.size > 1:
        results = [None] * world.size
        dist.all_gather_object(results, mine)
    return results


@dataclass(slots=True)
class _Watch:
    """Positions in forward order: block number, then the order in which modules finished."""

    order: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    gradients: set[str] = field(default_factory=set)

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        name = name or "decoder"

        def finished(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.order.setdefault(name, len(self.order))
            some = list(_tensors(output))
            if not all(_finite(each) for each in some) and not self.outputs:
                # not in a submodule: the attention core, a sum
                inside = name if all(_finite(each) for each in _tensors(args)) else _parent(name)
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
