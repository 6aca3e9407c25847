"""A step's time on this rank: data, generation, forward, backward, exposed communication,
optimizer, other.

Each moment counts for one part only, so that the parts add up to the step. Does not depend on what
is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from workers.training.trace.clock import Clock, Stamp

PARTS = ("data", "generation", "forward", "backward", "exposed", "optimizer", "other")
# the engine's phases that belong to steps; validation, for example, does not
_PART_BY_PHASE = {
    "forward": "forward",
    "backward": "backward",
    "update": "optimizer",
    **dict.fromkeys(("weight_sync", "generation", "rewards", "scoring"), "generation"),
}
_METRIC_NAMES = {part: f"time/{part}_s" for part in PARTS} | {"exposed": "comm/exposed_s"}


class StepTimeBreakdown:
    """Seconds of each part per step.

    `exposed` is the time the training thread is blocked in waits for collectives, sends and
    receives (on CUDA: its stream), and with DDP also from its last gradient to the end of its
    backward pass. Overlapped communication is not counted. `optimizer` is norm, clipping and
    update.

    A step is the time between two calls of `end_step`: its update is that of the step before.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.part: str | None = None
        self._since: Stamp = clock.now()
        self._marks: list[tuple[str, Stamp, Stamp]] = []
        # of steps that have not been read yet
        self._unread: deque[list[tuple[str, Stamp, Stamp]]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps = 0
        self._wall_s = 0.0
        self._began_s: float | None = None

    def phase(self, phase: str) -> None:
        """Enter the part of an engine phase, or none."""
        self.enter(_PART_BY_PHASE.get(phase))

    def enter(self, part: str | None) -> str | None:
        """Count time for `part` (None: for no part) from now on; returns the previous part."""
        before = self.part
        if part == before:
            return before
        read_s = time.perf_counter()  # one reading for both clocks
        now = self.clock.now(read_s)
        if before is not None:
            self._marks.append((before, self._since, now))
        if before is None:
            self._began_s = read_s
        elif part is None and self._began_s is not None:
            self._wall_s += read_s - self._began_s
            self._began_s = None
        self.part, self._since = part, now
        return before

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count time for `part` inside the context."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def end_step(self) -> float:
        """End the step; returns its seconds in any part, by the CPU's clock."""
        part = self.enter(None)
        self.enter(part)
        self._unread.append(self._marks)
        self._marks = []
        seconds, self._wall_s = self._wall_s, 0.0
        return seconds

    def read_oldest_step(self) -> None:
        """Read the oldest unread step; call after its sums are received, when its events have
        completed.
        """
        for part, since, until in self._unread.popleft():
            self._seconds[part] += self.clock.between(since, until)
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Means over the steps read since the last call, without `generation` if it took no
        time; resets them.
        """
        means = {
            _METRIC_NAMES[part]: seconds / max(self._steps, 1)
            for part, seconds in self._seconds.items()
            if part != "generation" or seconds
        }
        self._seconds, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return means
