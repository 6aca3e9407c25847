"""Which exit class an error of training means: numbers that end, memory, other ranks that are gone
or silent.

Does not import torch: a wrong spec must be told before anything heavy is loaded.
"""

from __future__ import annotations

import re

from workers.contracts.wire.exits import Outcome, UserError, is_out_of_memory, reason_of

# how gloo, NCCL and the rendezvous store speak of a peer that is gone, or silent beyond the group's
# timeout
_LOST = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket|TCPStore|[Tt]imed out waiting",
    re.A,
)
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
# where torch's allocator on a CPU noticed, before it says what it wanted
_NOTICED = re.compile(r"^\[enforce fail at [^]]*\].*?(?=DefaultCPUAllocator)")
_TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout", re.A)


class NumericsError(ArithmeticError):
    """The loss or the gradients are no longer numbers."""


def classify(error: BaseException, step: int) -> Outcome:
    """The exit class that an uncaught error means; its reason is the error's first line."""
    failures = getattr(error, "failures", None)  # a checkpoint's, by rank, each with its own cause
    if isinstance(failures, dict) and failures:
        rank, (cause, _) = next(iter(failures.items()))
        found = classify(cause, step)
        return Outcome(
            found.exit_class,
            f"the checkpoint could not be written or read: rank {rank}: {found.reason}",
            step,
        )
    reason = reason_of(error)
    if isinstance(error, UserError):
        return Outcome("user_error", reason, step)
    if isinstance(error, NumericsError):
        return Outcome("numerics", reason, step)
    if is_out_of_memory(error):
        return Outcome("out_of_memory", _NOTICED.sub("", reason), step)
    told = f"{type(error).__name__}: {reason}"
    if type(error).__module__.startswith(_COMPILER):
        return Outcome(
            "user_error", f"torch.compile failed on a block ({told}); try train.compile false", step
        )
    if isinstance(error, RuntimeError) and _LOST.search(reason):
        if _TIMEOUT.search(reason):
            return Outcome("hang", f"another rank did not answer in time: {told}", step)
        return Outcome("infrastructure", f"another rank was lost: {told}", step)
    return Outcome("infrastructure" if isinstance(error, OSError) else "user_error", told, step)
