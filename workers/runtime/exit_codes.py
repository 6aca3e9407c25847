"""Exits of an engine process: exit classes and codes, the class of an error, `rank-N/exit.json`.

Does not import torch, so a wrong spec is reported before anything heavy loads.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

CODES = {
    "ok": 0,
    "user_error": 64,
    "numerics": 65,
    "out_of_memory": 66,
    "preempted": 67,
    "cancelled": 67,
    "hang": 69,
    "infrastructure": 69,
}

# messages of gloo, NCCL and the rendezvous store about a lost peer, or one silent beyond the
# group's timeout
_LOST_PEER = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket|TCPStore|[Tt]imed out waiting",
    re.A,
)
_TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout", re.A)
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
# source location that torch's CPU allocator prints before its message
_CPU_ALLOCATOR_PREFIX = re.compile(r"^\[enforce fail at [^]]*\].*?(?=DefaultCPUAllocator)")
# out-of-memory messages of plain RuntimeErrors: torch's CPU allocator, C++, CUDA calls, workspaces
_NO_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)


class UserError(ValueError):
    """The request cannot be met; the message names the value and what to do next."""


class RunServerLost(ConnectionError):
    """A serve run that has answered does not answer any more; the next attempt waits for it."""


class NumericsError(ArithmeticError):
    """The loss, the gradients or the logits are no longer finite numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why a rank exited: a class of CODES, a message, and its finished steps or written answers."""

    exit_class: str
    reason: str
    step: int = 0

    @property
    def code(self) -> int:
        """The exit code of the class."""
        return CODES[self.exit_class]


def classify(error: BaseException, step: int = 0) -> Outcome:
    """The exit class of an uncaught error; the reason is the error's first line."""
    failures = getattr(error, "failures", None)  # a checkpoint's errors by rank
    if isinstance(failures, dict) and failures:
        rank, (cause, _) = next(iter(failures.items()))
        outcome = classify(cause, step)
        return Outcome(
            outcome.exit_class,
            f"the checkpoint could not be written or read: rank {rank}: {outcome.reason}",
            step,
        )
    reason = first_line(error)
    if isinstance(error, UserError):
        return Outcome("user_error", reason, step)
    if isinstance(error, RunServerLost):
        return Outcome("preempted", f"the server was lost: {reason}", step)
    if isinstance(error, NumericsError):
        return Outcome("numerics", reason, step)
    if is_out_of_memory(error):
        return Outcome("out_of_memory", _CPU_ALLOCATOR_PREFIX.sub("", reason), step)
    message = f"{type(error).__name__}: {reason}"
    if type(error).__module__.startswith(_COMPILER):
        return Outcome(
            "user_error",
            f"torch.compile failed on a block ({message}). Use train.compile false.",
            step,
        )
    if isinstance(error, RuntimeError) and _LOST_PEER.search(reason):
        if _TIMEOUT.search(reason):
            return Outcome("hang", f"another rank did not answer in time: {message}", step)
        return Outcome("infrastructure", f"another rank was lost: {message}", step)
    return Outcome("infrastructure" if isinstance(error, OSError) else "user_error", message, step)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, CUDA, Python or the system means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def write_exit(directory: Path, rank: int, outcome: Outcome) -> None:
    """Write `rank-N/exit.json` atomically."""
    folder = directory / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "class": outcome.exit_class,
        "reason": outcome.reason,
        "step": outcome.step,
        "code": outcome.code,
    }
    write_atomically(folder / "exit.json", json.dumps(record))


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
