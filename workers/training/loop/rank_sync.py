"""Decisions that all ranks share, and errors that all ranks raise: nobody is left waiting for one
that has given up.

Only plain data travels between ranks. Does not know what is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from workers.runtime.exits import UserError
from workers.training.parallel.mesh import World

T = TypeVar("T")


def agreed(world: World, decide: Callable[[], T], *, leads: bool) -> T:
    """What rank 0 decides, on every rank; its error is raised on every rank too, so that none is
    left waiting.
    """
    found = _try(decide) if leads else (None, None)
    if world.size > 1:
        told = [found]
        dist.broadcast_object_list(told, src=0)
        found = told[0]
    return cast(T, _value_or_raise(found))


def together(world: World, act: Callable[[], object], *, leads: bool) -> None:
    """Run `act` on the leading rank of each node; every rank goes on when all are done, or raises
    the first error.
    """
    error = _try(act)[1] if leads else None
    if world.size > 1:
        errors: list[Any] = [None] * world.size
        dist.all_gather_object(errors, error)
        error = next((item for item in errors if item is not None), None)
    _value_or_raise((None, error))


def _try(act: Callable[[], T]) -> tuple[T | None, tuple[bool, str] | None]:
    """The value, or whether it was the user's error and what it says.

    Only plain data travels between ranks.
    """
    try:
        return act(), None
    except UserError as error:
        return None, (True, str(error))
    except OSError as error:
        return None, (False, str(error))


def _value_or_raise(found: Any) -> Any:
    value, error = found
    if error is not None:
        users, message = error
        raise UserError(message) if users else OSError(message)
    return value
