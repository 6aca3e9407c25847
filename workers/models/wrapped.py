"""Replaces a module by a variant whose forward pass runs inside wrappers, innermost first.

The variant is a subclass with the same parameters under the same names, like those of
`linear_variants`. Does not depend on what wrappers do: compile, cast, redistribute, recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from torch import nn

from workers.models.linear_variants import variant_of

M = TypeVar("M", bound=nn.Module)
W = TypeVar("W")
Inner = Callable[..., Any]


class Wrapper(Protocol):
    """One layer around a module's forward pass."""

    def __call__(self, module: nn.Module, inner: Inner, /, *args: Any) -> Any:
        """The output of `module`; `inner` is its forward pass without this wrapper."""
        ...


class Wrapped(nn.Module):
    """Mixin of variants: the model's own forward pass inside `wrappers`, the last one outermost."""

    wrappers: tuple[Wrapper, ...]

    def forward(self, *args: Any) -> Any:
        """The wrapped output of the module's own forward pass."""
        run: Inner = super().forward
        for wrapper in self.wrappers:
            run = partial(wrapper, self, run)
        return run(*args)


def wrapped(module: M, wrapper: Wrapper) -> M:
    """The variant of `module` with `wrapper` outermost; put it where `module` is in its parent.

    Raises TypeError for a module that `fully_shard` holds on to: wrap before sharding.
    """
    if isinstance(module, Wrapped):
        module.wrappers = (*module.wrappers, wrapper)
        return module
    if hasattr(module, "unshard"):
        raise TypeError(f"{type(module).__name__} was wrapped after fully_shard; wrap it before")
    plain: Any = type(module)
    kind: type[M] = _variant(plain)
    return variant_of(module, kind, wrappers=(wrapper,))


def wrapper_of(module: nn.Module, kind: type[W]) -> W | None:
    """The module's wrapper of class `kind`, if it has one."""
    wrappers = module.wrappers if isinstance(module, Wrapped) else ()
    return next((each for each in wrappers if isinstance(each, kind)), None)


@cache
def _variant(kind: type[nn.Module]) -> Any:
    """One class per class, so that compiled code is shared by modules of a kind."""
    return type(f"Wrapped{kind.__name__}", (Wrapped, kind), {"__doc__": kind.__doc__})
