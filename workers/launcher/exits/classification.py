"""Exit class, first cause and reason of an attempt on this node.

Pure: judges exit codes, signals, `exit.json` of the engines and the last lines of stderr. Does not
depend on retries.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CODES = {
    64: "user_error",
    65: "numerics",
    66: "out_of_memory",
    67: "preempted",
    69: "infrastructure",
}
# distance from the first cause: a rank's own error, a killed rank, a lost peer, a stopped rank
_CAUSE_DISTANCE = {
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
_ENVIRONMENT = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Address already in "
    r"use|EADDRINUSE|"
    r"Connection (reset|refused|closed)|Broken "
    r"pipe|DistBackendError|DistNetworkError|DistStoreError|NCCL error|"
    r"gloo/transport|Timed out waiting|ECC error|unspecified launch failure|device is lost|No "
    r"module named 'torch'",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankExit:
    """How one rank exited; `code` is negative for a signal, None for a rank without a status."""

    rank: int
    code: int | None
    time: float
    record: Mapping[str, Any] = field(default_factory=dict)  # its exit.json {class, reason, step}
    last_lines: Sequence[str] = ()


@dataclass(frozen=True)
class Verdict:
    """The exit report of an attempt on this node."""

    exit_class: str
    reason: str
    rank: int | None = None
    code: int | None = None
    step: int | None = None
    signal: str | None = None
    time: float | None = None
    cause: str | None = None  # "preflight": the user's program did not start

    def to_dict(self) -> dict[str, Any]:
        """The data of an `exited` report, without empty fields."""
        data = {
            "class": self.exit_class,
            "reason": self.reason[:1000],
            "rank": self.rank,
            "code": self.code,
            "step": self.step,
            "signal": self.signal,
            "time": self.time,
            "cause": self.cause,
        }
        return {key: value for key, value in data.items() if value is not None}


def judge(
    ends: Sequence[RankExit],
    *,
    torchrun_code: int | None,
    torchrun_output: Sequence[str],
    oom_killed: bool,
) -> Verdict:
    """The verdict on a node's ranks if no stop was requested."""
    if ends and torchrun_code == 0 and all(end.code == 0 for end in ends):
        steps = [end.record["step"] for end in ends if isinstance(end.record.get("step"), int)]
        return Verdict("ok", "All ranks finished.", step=max(steps, default=None), code=0)
    verdicts = [rank_verdict(end, oom_killed=oom_killed) for end in ends if end.code != 0]
    if not verdicts:
        line = _last_line(torchrun_output) or "it printed nothing"
        return Verdict(
            "infrastructure",
            f"torchrun exited with code {torchrun_code} before any rank: {line}",
            code=torchrun_code,
        )
    return min(verdicts, key=lambda verdict: (cause_distance(verdict), verdict.time or 0.0))


def cause_distance(verdict: Verdict) -> int:
    """0 is the first cause; a rank killed by a signal comes before ranks that lost it."""
    if verdict.exit_class == "infrastructure" and verdict.signal not in (None, "SIGTERM"):
        return 1
    if verdict.signal == "SIGTERM":
        return 3
    return _CAUSE_DISTANCE.get(verdict.exit_class, 2)


def rank_verdict(
    end: RankExit, *, oom_killed: bool = False, stopped_for: Verdict | None = None
) -> Verdict:
    """One rank's own verdict.

    `stopped_for` is the supervisor's verdict, for which it ended the ranks: a rank that ended by a
    signal or without a status after it has its class.
    """
    if stopped_for is not None and (end.code is None or end.code < 0 or end.code > 128):
        after = stopped_for.time is None or end.time >= stopped_for.time
        own = rank_verdict(end, oom_killed=oom_killed)
        if after and own.exit_class == "infrastructure":
            reason = f"{own.reason} It was stopped because: {stopped_for.reason}"
            return replace(own, exit_class=stopped_for.exit_class, reason=reason)
        return own
    code = -9 if end.code == 137 else end.code  # a shell in between exits with 128 + 9
    step = end.record.get("step") if isinstance(end.record.get("step"), int) else None

    def verdict(exit_class: str, reason: str, name: str | None = None) -> Verdict:
        return Verdict(
            exit_class, reason, rank=end.rank, code=code, step=step, signal=name, time=end.time
        )

    if code is None:
        return verdict(
            "infrastructure", f"Rank {end.rank} vanished without an exit status.", "vanished"
        )
    if end.record.get("class") and code >= 0:
        return verdict(
            str(end.record["class"]),
            f"Rank {end.rank}: {end.record.get('reason', 'no reason given')}",
        )
    if code < 0:
        name = _signal_name(-code)
        if code == -9 and oom_killed:
            reason = (
                f"Rank {end.rank} was killed by the kernel's out-of-memory killer; use less "
                "memory or more devices."
            )
            return verdict("out_of_memory", reason, name)
        detail = "" if code in (-9, -15) else f": {_last_line(end.last_lines)}"
        return verdict("infrastructure", f"Rank {end.rank} was ended by {name}{detail}.", name)
    line = _last_line(end.last_lines)
    if code in CODES:
        return verdict(
            CODES[code],
            f"Rank {end.rank} exited with {code}: {line or CODES[code].replace('_', ' ')}",
        )
    stderr = "\n".join(list(end.last_lines)[-40:])
    if _MEMORY.search(line) or _MEMORY.search(stderr):
        return verdict("out_of_memory", f"Rank {end.rank} ran out of memory: {line}")
    if _ENVIRONMENT.search(stderr):
        cause = next(text for text in reversed(stderr.splitlines()) if _ENVIRONMENT.search(text))
        return verdict(
            "infrastructure", f"Rank {end.rank} failed on its environment: {cause.strip()}"
        )
    return verdict(
        "user_error", f"Rank {end.rank} exited with {code}: {line or 'it wrote nothing to stderr'}"
    )


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:400]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
