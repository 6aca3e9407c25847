"""Replaces the linear layers inside blocks by variants that compute differently.

A variant is a subclass that keeps the parameters under their names: plain, fp8, quantization-aware.
Does not depend on what a variant computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from workers.models.moe.experts import StackedLinear

M = TypeVar("M", bound=nn.Module)


class Linear(Protocol):
    """What blocks require of a linear layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., K]` → `[..., N]`."""
        ...


def variant_of(module: nn.Module, kind: type[M], /, **attributes: Any) -> M:
    """`module` as an instance of its subclass `kind`, with the same parameters and `attributes`."""
    variant = kind.__new__(kind)
    variant.__dict__.update(module.__dict__)
    variant.__dict__.update(attributes)
    return variant


def replace_linears(
    decoder: nn.Module,
    dense: Callable[[nn.Linear], nn.Linear],
    stacked: Callable[[StackedLinear], StackedLinear],
) -> None:
    """Replace every `nn.Linear` and `StackedLinear` (of routed experts) inside blocks.

    Routers, norms, embeddings and the head stay. Call it before parameters are sharded or cast:
    those steps hold on to the modules that they find.
    """
    for block in decoder.get_submodule("blocks").children():
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, dense(child))
                elif isinstance(child, StackedLinear):
                    setattr(parent, name, stacked(child))
