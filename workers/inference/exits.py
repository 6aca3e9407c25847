"""How an inference run ends: its exit classes and codes, the errors that mean them, and `rank-0/exit.json`.

Does not import torch: a wrong spec must be told before anything heavy is loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

CODES = {"ok": 0, "user_error": 64, "numerics": 65, "out_of_memory": 66, "preempted": 67, "infrastructure": 69}


class UserError(ValueError):
    """What was asked for cannot be done; the message says what, which and what to do next."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why the run left: one of CODES, a sentence, and how many answers are written."""

    exit_class: str
    reason: str
    step: int = 0

    @property
    def code(self) -> int:
        return CODES[self.exit_class]


def classify(error: BaseException, step: int = 0) -> Outcome:
    """The exit class that an uncaught error means; its reason is the error's first line."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, UserError):
        return Outcome("user_error", reason, step)
    if isinstance(error, ArithmeticError):
        return Outcome("numerics", reason, step)
    exhausted = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if exhausted or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Outcome("out_of_memory", reason, step)
    told = f"{type(error).__name__}: {reason}"
    return Outcome("infrastructure" if isinstance(error, OSError) else "user_error", told, step)


def write_exit(directory: Path, outcome: Outcome) -> None:
    """By a rename: complete or absent. Raises OSError."""
    folder = directory / "rank-0"
    folder.mkdir(parents=True, exist_ok=True)
    told = {"class": outcome.exit_class, "reason": outcome.reason, "step": outcome.step, "code": outcome.code}
    beside = folder / f".exit.json.{os.getpid()}"
    beside.write_text(json.dumps(told), encoding="utf-8")
    os.replace(beside, folder / "exit.json")
