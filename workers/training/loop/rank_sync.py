"""Decisions and errors shared by all ranks, so that none waits for one that has failed.

Only plain data is sent between ranks. Does not depend on what is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from workers.runtime.exit_codes import UserError
from workers.training.parallel.mesh import World

T = TypeVar("T")


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


def _try(act: Callable[[], T]) -> tuple[T | None, tuple[bool, str] | None]:
    """The value, or whether the error is the user's and its message."""
    try:
        return act(), None
    except UserError as error:
        return None, (True, str(error))
    except OSError as error:
        return None, (False, str(error))


def _value_or_raise(result: Any) -> Any:
    value, error = result
    if error is not None:
        is_user_error, message = error
        raise UserError(message) if is_user_error else OSError(message)
    return value
