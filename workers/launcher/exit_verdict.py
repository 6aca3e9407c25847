"""Why an attempt ended on this node: exit class, first cause and a reason sentence, from what the
ranks left behind.

Pure: exit codes, signals, `exit.json` of our engine, last words of stderr. Does not know retries.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CODES = {
    64: "user_error",
    65: "numerics",
    66: "out_of_memory",
    67: "preempted",
    69: "infrastructure",
}
# how near to the first cause: what a rank found wrong in itself, a killed rank, a lost peer, an
# ended bystander
_NEARNESS = {
    "user_error": 0,
    "numerics": 0,
    "out_of_memory": 0,
    "hang": 0,
    "infrastructure": 2,
    "preempted": 3,
    "cancelled": 3,
}
_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|^MemoryError|std::bad_alloc",
    re.IGNORECASE,
)
_SURROUNDINGS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Address already in "
    r"use|EADDRINUSE|"
    r"Connection (reset|refused|closed)|Broken "
    r"pipe|DistBackendError|DistNetworkError|DistStoreError|NCCL error|"
    r"gloo/transport|Timed out waiting|ECC error|unspecified launch failure|device is lost|No "
    r"module named 'torch'",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `code` is negative for a signal, None for a rank that left no status."""

    rank: int
    code: int | None
    time: float
    told: Mapping[str, Any] = field(default_factory=dict)  # its exit.json {class, reason, step}
    last_words: Sequence[str] = ()


@dataclass(frozen=True)
class Verdict:
    exit_class: str
    reason: str
    rank: int | None = None
    code: int | None = None
    step: int | None = None
    signal: str | None = None
    time: float | None = None

    def to_dict(self) -> dict[str, Any]:
        found = {
            "class": self.exit_class,
            "reason": self.reason[:1000],
            "rank": self.rank,
            "code": self.code,
            "step": self.step,
            "signal": self.signal,
            "time": self.time,
        }
        return {key: value for key, value in found.items() if value is not None}


def judge(
    ends: Sequence[RankEnd],
    *,
    torchrun_code: int | None,
    torchrun_words: Sequence[str],
    oom_killed: bool,
) -> Verdict:
    """The verdict over a node's ranks when nobody asked them to end."""
    if ends and torchrun_code == 0 and all(end.code == 0 for end in ends):
        steps = [end.told["step"] for end in ends if isinstance(end.told.get("step"), int)]
        return Verdict("ok", "All ranks finished.", step=max(steps, default=None), code=0)
    verdicts = [of_rank(end, oom_killed=oom_killed) for end in ends if end.code != 0]
    if not verdicts:
        words = _last_line(torchrun_words) or "it left no words"
        return Verdict(
            "infrastructure",
            f"torchrun ended with code {torchrun_code} before any rank: {words}",
            code=torchrun_code,
        )
    return min(verdicts, key=lambda verdict: (nearness(verdict), verdict.time or 0.0))


def nearness(verdict: Verdict) -> int:
    """0 nearest to the first cause.

    A rank killed by a signal stands before those that then lost it.
    """
    if verdict.exit_class == "infrastructure" and verdict.signal not in (None, "SIGTERM"):
        return 1
    if verdict.signal == "SIGTERM":
        return 3
    return _NEARNESS.get(verdict.exit_class, 2)


def of_rank(end: RankEnd, *, oom_killed: bool = False) -> Verdict:
    """One rank's own verdict."""
    code = -9 if end.code == 137 else end.code  # a shell between says 128 + 9
    step = end.told.get("step") if isinstance(end.told.get("step"), int) else None

    def verdict(exit_class: str, reason: str, name: str | None = None) -> Verdict:
        return Verdict(
            exit_class, reason, rank=end.rank, code=code, step=step, signal=name, time=end.time
        )

    if code is None:
        return verdict(
            "infrastructure", f"Rank {end.rank} vanished without an exit status.", "vanished"
        )
    if end.told.get("class") and code >= 0:
        return verdict(
            str(end.told["class"]), f"Rank {end.rank}: {end.told.get('reason', 'no reason told')}"
        )
    if code < 0:
        name = _signal_name(-code)
        if code == -9 and oom_killed:
            reason = (
                f"Rank {end.rank} was ended by the kernel's out-of-memory killer; use less "
                "memory or more devices."
            )
            return verdict("out_of_memory", reason, name)
        words = "" if code in (-9, -15) else f": {_last_line(end.last_words)}"
        return verdict("infrastructure", f"Rank {end.rank} was ended by {name}{words}.", name)
    words = _last_line(end.last_words)
    if code in CODES:
        return verdict(
            CODES[code],
            f"Rank {end.rank} exited with {code}: {words or CODES[code].replace('_', ' ')}",
        )
    said = "\n".join(list(end.last_words)[-40:])
    if _MEMORY.search(words) or _MEMORY.search(said):
        return verdict("out_of_memory", f"Rank {end.rank} ran out of memory: {words}")
    if _SURROUNDINGS.search(said):
        line = next(
            (line for line in reversed(said.splitlines()) if _SURROUNDINGS.search(line)), words
        )
        return verdict("infrastructure", f"Rank {end.rank} lost its surroundings: {line.strip()}")
    return verdict(
        "user_error", f"Rank {end.rank} exited with {code}: {words or 'it left no words on stderr'}"
    )


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:400]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
