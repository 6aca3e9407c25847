"""Moments on the training thread, read as seconds later: the CPU's own clock, or events on a GPU's
stream.

On Linux the clock is that of all processes of a node. Does not know what happens between two
moments.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Stamp = Any  # seconds as float, or a torch.cuda.Event


class Clock:
    """`now()` costs 50 ns on a CPU, and some microseconds for an event on the current CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._anchor: tuple[Any, float] | None = None
        self.anchor()

    def now(self, read_s: float | None = None) -> Stamp:
        """`read_s`: what `time.perf_counter` said just now, where the caller has asked it already."""
        if not self._events:
            return time.perf_counter() if read_s is None else read_s
        event: Stamp = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def anchor(self) -> None:
        """Call where the stream has nothing left to do: later events are counted from here."""
        if self._events:
            event = self.now()
            event.synchronize()
            self._anchor = event, time.perf_counter()

    def between(self, start: Stamp, end: Stamp) -> float:
        """Seconds. Waits for the events where they have not happened yet."""
        if not self._events:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1000.0)

    def read(self, stamp: Stamp) -> float:
        """Seconds by `time.perf_counter`. Waits for the event where it has not happened yet."""
        if not self._events:
            return float(stamp)
        assert self._anchor is not None
        stamp.synchronize()
        event, wall_s = self._anchor
        return float(wall_s + event.elapsed_time(stamp) / 1000.0)
