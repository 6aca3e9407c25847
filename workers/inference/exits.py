"""Which exit class an error of inference means.

Does not import torch: a wrong spec must be told before anything heavy is loaded.
"""

from __future__ import annotations

from workers.contracts.wire.exits import Outcome, UserError, is_out_of_memory, reason_of


def classify(error: BaseException, step: int = 0) -> Outcome:
    """The exit class that an uncaught error means; its reason is the error's first line."""
    reason = reason_of(error)
    if isinstance(error, UserError):
        return Outcome("user_error", reason, step)
    if isinstance(error, ArithmeticError):
        return Outcome("numerics", reason, step)
    if is_out_of_memory(error):
        return Outcome("out_of_memory", reason, step)
    told = f"{type(error).__name__}: {reason}"
    return Outcome("infrastructure" if isinstance(error, OSError) else "user_error", told, step)
