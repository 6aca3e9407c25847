"""What a rank shows of its progress to whoever stands beside it, and how it is read: a beacon, and
a pulse.

The beacon is a mapped file of a few words that the training thread overwrites at every mark, and
that can be read while
that thread hangs; the pulse is a JSON file from a thread of its own. Knows neither torch nor what a
phase means.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEACON, PULSE = "beacon", "pulse.json"
VERSION = 1
# version, finished steps, micro-batch, marks since the start, nanoseconds of the monotonic clock,
# phase
LAYOUT = struct.Struct("=qqqqq16s")
# when the pulse last beat, monotonic nanoseconds: written by another thread, so a word of its own
BEAT = struct.Struct("=q")
SIZE = LAYOUT.size + BEAT.size
# between beats; a process that misses several is stopped, swapped out, or holds its interpreter
BEAT_S = 0.5
NO_BEAT_S = 4.0


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading.

    `idle_s`: since the last mark, `beat_s`: since the last beat, both by this machine's clock.
    """

    step: int
    micro_batch: int
    marks: int
    phase: str
    idle_s: float
    beat_s: float


@dataclass(frozen=True, slots=True)
class Pulse:
    """`calls`: collectives entered so far, by process group. `arrivals`: `(group, number, Unix ns)`
    of the newest ones.

    `where` says which line of ours the training thread stands in.
    """

    where: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)
    arrivals: tuple[tuple[str, int, int], ...] = ()
    time: float = 0.0


def read_progress(folder: Path, *, now_ns: int) -> Progress | None:
    """From `rank-N/`; None where no rank has begun to show itself.

    `now_ns` is `time.monotonic_ns()`.
    """
    try:
        data = (folder / BEACON).read_bytes()
        version, step, micro_batch, marks, marked_ns, phase = LAYOUT.unpack_from(data)
        (beat_ns,) = BEAT.unpack_from(data, LAYOUT.size)
    except (OSError, struct.error):
        return None
    if version != VERSION or not marked_ns or not beat_ns:  # the first mark is being written
        return None
    name = phase.rstrip(b"\0").decode("ascii", "replace")
    idle_s, beat_s = (max(0.0, (now_ns - at) / 1e9) for at in (marked_ns, beat_ns))
    return Progress(step, micro_batch, marks, name, idle_s, beat_s)


def read_pulse(folder: Path) -> Pulse:
    """From `rank-N/`; an empty one where there is none yet."""
    try:
        told: dict[str, Any] = json.loads((folder / PULSE).read_bytes())
        arrivals = tuple(
            (str(group), int(number), int(ns)) for group, number, ns in told["arrivals"]
        )
        return Pulse(str(told["where"]), dict(told["calls"]), arrivals, float(told["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Pulse()
