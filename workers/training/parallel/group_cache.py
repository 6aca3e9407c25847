"""Caches process groups and meshes per process, as long as the world stays the same.

A group costs threads until the process ends, and one process may run many attempts (benchmark
variants, tests). Does not depend on plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
_cache: dict[Hashable, Any] = {}
_world: Any = None


def cached_group(key: Hashable, make: Callable[[], T]) -> T:
    """The result of `make` for `key` in this world; all ranks request the same keys in the same
    order.
    """
    global _world
    if _world is not dist.group.WORLD:
        _cache.clear()
        _world = dist.group.WORLD
    if key not in _cache:
        _cache[key] = make()
    return cast(T, _cache[key])
