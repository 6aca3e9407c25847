"""How a rank ends: its exit classes and codes, the errors that mean them, and `exit.json`.

Does not import torch: a wrong spec must be told before anything heavy is loaded.
"""

from __future__ import annotations

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

# how gloo, NCCL and the rendezvous store speak of a peer that is gone, or silent beyond the group's timeout
_LOST = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket|TCPStore|[Tt]imed out waiting", re.A
)
_TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout", re.A)


class UserError(ValueError):
    """What was asked for cannot be done; the message says what, which and what to do next."""


class NumericsError(ArithmeticError):
    """The loss or the gradients are no longer numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why a rank left: one of CODES, a sentence, and the last finished step."""

    exit_class: str
    reason: str
    step: int

    @property
    def code(self) -> int:
        return CODES[self.exit_class]


def classify(error: BaseException, step: int) -> Outcome:
    """The exit class that an uncaught error means; its reason is the error's first line."""
    failures = getattr(error, "failures", None)  # a checkpoint's, by rank, each with its own cause
    if isinstance(failures, dict) and failures:
        rank, (cause, _) = next(iter(failures.items()))
        found = classify(cause, step)
        return Outcome(
            found.exit_class, f"the checkpoint could not be written or read: rank {rank}: {found.reason}", step
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, UserError):
        return Outcome("user_error", reason, step)
    if isinstance(error, NumericsError):
        return Outcome("numerics", reason, step)
    if is_out_of_memory(error):
        return Outcome("out_of_memory", reason, step)
    told = f"{type(error).__name__}: {reason}"
    if isinstance(error, RuntimeError) and _LOST.search(reason):
        if _TIMEOUT.search(reason):
            return Outcome("hang", f"another rank did not answer in time: {told}", step)
        return Outcome("infrastructure", f"another rank was lost: {told}", step)
    return Outcome("infrastructure" if isinstance(error, OSError) else "user_error", told, step)


def is_out_of_memory(error: BaseException) -> bool:
    """Torch names CUDA's; on a CPU its allocator raises a plain RuntimeError, and Python a MemoryError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def write_exit(directory: Path, rank: int, outcome: Outcome) -> None:
    """`rank-N/exit.json`, by a rename: complete or absent."""
    folder = directory / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    told = {"class": outcome.exit_class, "reason": outcome.reason, "step": outcome.step, "code": outcome.code}
    write_atomically(folder / "exit.json", json.dumps(told))


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old text or the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
