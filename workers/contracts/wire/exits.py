"""How a process of an engine ends: its exit classes and codes, what it tells of it, and
`rank-N/exit.json`.

Standard library only: a wrong spec must be told before anything heavy is loaded. Which errors mean
which class, beyond
memory, each engine knows by itself.
"""

from __future__ import annotations

import errno
import json
import os
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


class UserError(ValueError):
    """What was asked for cannot be done; the message says what, which and what to do next."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why a rank left: one of CODES, a sentence, and how far it came: finished steps, or answers
    written.
    """

    exit_class: str
    reason: str
    step: int = 0

    @property
    def code(self) -> int:
        return CODES[self.exit_class]


def reason_of(error: BaseException) -> str:
    """An error's first line, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# torch's allocator on a CPU, C++'s, CUDA's own calls and its libraries' workspaces: plain
# RuntimeErrors all of them
_NO_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Torch names that of CUDA's allocator, Python raises MemoryError, and what maps files an
    OSError.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def write_exit(directory: Path, rank: int, outcome: Outcome) -> None:
    """`rank-N/exit.json`, by a rename: complete or absent."""
    folder = directory / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "class": outcome.exit_class,
        "reason": outcome.reason,
        "step": outcome.step,
        "code": outcome.code,
    }
    write_atomically(folder / "exit.json", json.dumps(told))


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old text or the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
