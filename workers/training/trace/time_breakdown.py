"""Where a step's time goes on this rank: data, forward, backward, exposed communication, optimizer,
other.

At each moment the time counts for one of them, so that they add up to the step by construction.
Knows moments; does
not know who waits for what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from workers.training.trace.clock import Clock, Stamp

PARTS = ("data", "forward", "backward", "exposed", "optimizer", "other")
# the engine's phases; in all others, such as validation, no step is made
_PART_OF_PHASE = {"forward": "forward", "backward": "backward", "update": "optimizer"}
_NAMES = {part: f"time/{part}_s" for part in PARTS} | {"exposed": "comm/exposed_s"}


class StepSplit:
    """`exposed` is what the training thread spends blocked in waits for collectives, sends and
    receives (on CUDA: what
    its stream does), and with DDP also from its last gradient to the end of its backward pass.
    Communication that runs
    beside computation counts nowhere. `optimizer` is norm, clipping and update.

    A step reaches from one `cut` to the next: the update in it is that of the step before.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.part: str | None = None
        self._since: Stamp = clock.now()
        self._marks: list[tuple[str, Stamp, Stamp]] = []
        # of steps that have not been read yet
        self._cut: deque[list[tuple[str, Stamp, Stamp]]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps = 0
        self._wall_s = 0.0
        self._began_s: float | None = None

    def phase(self, phase: str) -> None:
        self.enter(_PART_OF_PHASE.get(phase))

    def enter(self, part: str | None) -> str | None:
        """From now on time counts for `part`, or for none; returns what it counted for until now."""
        before = self.part
        if part == before:
            return before
        read_s = time.perf_counter()  # one reading for both: a thread may stand still between two
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
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def cut(self) -> float:
        """The step ends here: seconds since the last cut that counted for any part, by the CPU's
        clock.
        """
        part = self.enter(None)
        self.enter(part)
        self._cut.append(self._marks)
        self._marks = []
        seconds, self._wall_s = self._wall_s, 0.0
        return seconds

    def settle(self) -> None:
        """Read the oldest step that was cut and not read yet: its moments have happened, its sums
        being back.
        """
        for part, since, until in self._cut.popleft():
            self._seconds[part] += self.clock.between(since, until)
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Means over the steps read since the last call, and a new start."""
        found = {
            _NAMES[part]: seconds / max(self._steps, 1) for part, seconds in self._seconds.items()
        }
        self._seconds, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return found
