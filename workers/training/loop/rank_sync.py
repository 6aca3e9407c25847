"""Decisions and errors shared by all ranks, so that none waits for one that has failed.

Only plain data is sent between ranks. Does not depend on what is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from workers.runtime.exit_codes import RunServerLost, UserError
from workers.training.parallel.mesh import World

T = TypeVar("T")
_SHARED = (UserError, RunServerLost, OSError)  # an error is of the first class that it has


def broadcast_decision(world: World, decide: Callable[[], T], *, leads: bool) -> T:
    """The result of `decide` on rank 0, or its error, on every rank."""
    result = _try(decide) if leads else (None, None)
    if world.size > 1:
        results = [result]
        dist.broadcast_object_list(results, src=0)
        result = results[0]
    return cast(T, _value_or_raise(result))


def run_on_leaders(world: World, act: Callable[[], object], *, leads: bool) -> None:
    """Run `act` on the leading rank of each node; every rank waits, or raises the first error."""
    error = _try(act)[1] if leads else None
    if world.size > 1:
        errors: list[Any] = [None] * world.size
        dist.all_gather_object(errors, error)
        error = next((item for item in errors if item is not None), None)
    _value_or_raise((None, error))


def _try(act: Callable[[], T]) -> tuple[T | None, tuple[int, str] | None]:
    """The value, or the error's place in `_SHARED` and its message."""
    try:
        return act(), None
    except _SHARED as error:
        kind = next(i for i, each in enumerate(_SHARED) if isinstance(error, each))
        return None, (kind, str(error))


def _value_or_raise(result: Any) -> Any:
    value, error = result
    if error is not None:
        kind, message = error
        raise _SHARED[kind](message)
    return value
