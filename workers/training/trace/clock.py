"""Timestamps on the training thread, read later: the CPU's clock, or CUDA events on a stream.

On Linux all processes of a node share the clock. Does not depend on what is timed.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Stamp = Any  # seconds as float, or a torch.cuda.Event


class Clock:
    """`now()` costs 50 ns on a CPU, and some microseconds for an event on the current CUDA
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._anchor: tuple[Any, float] | None = None
        self.anchor()

    def now(self, read_s: float | None = None) -> Stamp:
        """A timestamp; `read_s` reuses a value that the caller has just read from
        `time.perf_counter`.
        """
        if not self._events:
            return time.perf_counter() if read_s is None else read_s
        event: Stamp = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def anchor(self) -> None:
        """Set the reference event; call while the stream is idle."""
        if self._events:
            event = self.now()
            event.synchronize()
            self._anchor = event, time.perf_counter()

    def between(self, start: Stamp, end: Stamp) -> float:
        """Seconds from `start` to `end`; waits for pending events."""
        if not self._events:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1000.0)

    def read(self, stamp: Stamp) -> float:
        """Seconds on the scale of `time.perf_counter`; waits for a pending event."""
        if not self._events:
            return float(stamp)
        assert self._anchor is not None
        stamp.synchronize()
        event, wall_s = self._anchor
        return float(wall_s + event.elapsed_time(stamp) / 1000.0)
