"""The progress files that each rank writes for its supervisor, and their readers: beacon and pulse.

The beacon is a small memory-mapped file that the training thread overwrites at every mark, so it
can be read while that thread hangs; the pulse is a JSON file written by a separate thread. Does not
depend on torch or on what a phase means.
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
# version, finished steps, micro-batch, marks since the start, monotonic nanoseconds, phase
LAYOUT = struct.Struct("=qqqqq16s")
# monotonic nanoseconds of the last beat; a separate word because another thread writes it
BEAT = struct.Struct("=q")
SIZE = LAYOUT.size + BEAT.size
# interval of beats; a process that misses several is stopped, swapped out or holds the GIL
BEAT_S = 0.5
NO_BEAT_S = 4.0


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading of a beacon; `idle_s` and `beat_s` are seconds since the last mark and beat."""

    step: int
    micro_batch: int
    marks: int
    phase: str
    idle_s: float
    beat_s: float


@dataclass(frozen=True, slots=True)
class Pulse:
    """One reading of a pulse.

    `calls`: collectives entered so far, by process group. `arrivals`: `(group, number, Unix ns)` of
    the newest ones. `where`: the source line that the training thread executes.
    """

    where: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)
    arrivals: tuple[tuple[str, int, int], ...] = ()
    time: float = 0.0


def read_progress(folder: Path, *, now_ns: int) -> Progress | None:
    """The beacon in `rank-N/`, None before the first mark; `now_ns` is `time.monotonic_ns()`."""
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
    """The pulse in `rank-N/`, an empty one before the first."""
    try:
        data: dict[str, Any] = json.loads((folder / PULSE).read_bytes())
        arrivals = tuple(
            (str(group), int(number), int(ns)) for group, number, ns in data["arrivals"]
        )
        return Pulse(str(data["where"]), dict(data["calls"]), arrivals, float(data["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Pulse()
