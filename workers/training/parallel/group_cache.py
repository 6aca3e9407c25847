"""Process groups and meshes that a process makes once and uses again, while its world stays the
same.

A group costs threads until the process ends, and a process may see many runs: benchmark variants,
tests. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
_kept: dict[Hashable, Any] = {}
_world: Any = None


def once(what: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave in this world for `what`; all ranks ask for the same things in the same
    order.
    """
    global _world
    if _world is not dist.group.WORLD:
        _kept.clear()
        _world = dist.group.WORLD
    if what not in _kept:
        _kept[what] = make()
    return cast(T, _kept[what])
