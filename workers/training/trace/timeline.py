"""A pipeline's timeline: each stage's actions per micro-batch, waits, and the bubble of a step.

Ranks add their times to the step's sums; the earliest start is the common origin. Does not depend
on schedules.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workers.training.trace.clock import Clock, Stamp

Action = tuple[str, int, int, Stamp, Stamp]  # kind ("" of a wait), stage, micro-batch, start, end
_ROW = 3  # first action's start, last one's end, seconds in actions


class Timeline:
    """The timeline of this rank's stages.

    Between `begin` and `end`, `action` surrounds F, B, I (input gradient) and W, and `add_wait`
    records each wait for communication.

    The bubble is the planner's: 1 - sum of seconds in actions / (ranks x span), where the span is
    from the first action of any rank to the last one. PipeDream never flushes: there each rank's
    span is its own step. `shared_clock`: all ranks are on one node and share its clock; otherwise
    they count from the receipt of the last step's sums, which is simultaneous (for PipeDream, which
    has none, from the time of day).
    """

    def __init__(
        self, clock: Clock, *, stages: int, rank: int, size: int, shared_clock: bool, flushes: bool
    ) -> None:
        self.clock, self.stages, self.rank, self.size, self.flushes = (
            clock,
            stages,
            rank,
            size,
            flushes,
        )
        self._shared_clock = shared_clock
        self._zero_s = 0.0 if shared_clock or flushes else time.perf_counter() - time.time()
        self._clock_known = shared_clock or not flushes
        self._recording = self._in_action = False
        self._span: list[Stamp] = []
        self._actions: list[Action] = []

    def begin(self) -> None:
        """Start recording a step."""
        self._recording, self._actions = True, []
        self._span = [self.clock.now()]

    def end(self) -> None:
        """Stop recording."""
        self._recording = False
        self._span.append(self.clock.now())

    @contextmanager
    def action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Records one action of a stage."""
        start, self._in_action = self.clock.now(), True
        yield
        self._in_action = False
        self._actions.append((kind, stage, micro_batch, start, self.clock.now()))

    def extend_last_forward(self) -> None:
        """Extend the last forward pass to now: torch's schedules compute the loss after it."""
        if self._actions and self._actions[-1][0] == "F":
            kind, stage, micro_batch, start, _ = self._actions[-1]
            self._actions[-1] = (kind, stage, micro_batch, start, self.clock.now())

    def add_wait(self, start: Stamp, end: Stamp) -> None:
        """Record a wait, unless inside an action, which then includes it."""
        if self._recording and not self._in_action:
            self._actions.append(("", -1, -1, start, end))

    def row(self, device: torch.device) -> Tensor:
        """`[size, 3]`, fp64: this rank's times of the step, to be summed over ranks."""
        times_by_rank = torch.zeros(self.size, _ROW, dtype=torch.float64)
        times = [
            (self.clock.read(start), self.clock.read(end))
            for kind, _, _, start, end in self._actions
            if kind
        ]
        if times and self._clock_known:
            busy_s = sum(end - start for start, end in times)
            first, last = times[0][0], times[-1][1]
            if not self.flushes:
                first, last = (self.clock.read(each) for each in self._span)
            times_by_rank[self.rank] = torch.tensor(
                [first - self._zero_s, last - self._zero_s, busy_s], dtype=torch.float64
            )
        return times_by_rank.to(device)

    def sync_clock(self) -> None:
        """Set the clock's origin; called when all ranks receive the step's sums."""
        if not self._shared_clock and self.flushes:
            self._zero_s, self._clock_known = time.perf_counter(), True

    def bubble(self, rows: Sequence[float]) -> tuple[float, float, float] | None:
        """The origin and span in seconds, and the bubble's share, from a step's summed rows.

        None if a rank's clock was not yet known.
        """
        began, ended, busy = (rows[place::_ROW] for place in range(_ROW))
        if not all(busy):
            return None
        zero, span_s = min(began), max(ended) - min(began)
        whole_s = len(busy) * span_s
        if not self.flushes:
            whole_s = sum(ended) - sum(began)
        return zero, span_s, 1.0 - sum(busy) / whole_s

    def seconds(self, zero: float) -> float:
        """The common origin on this process's `time.perf_counter` scale."""
        return self._zero_s + zero

    def actions(self) -> list[Action]:
        """The step's actions, including waits between them."""
        return [*self._actions]

    def event_rows(self, actions: list[Action], zero: float) -> list[list[Any]]:
        """`[kind, stage, micro-batch, start, end]` in seconds from the common origin.

        A wait belongs to the action after it: as `recv` before a forward pass that is not the first
        stage's, or a backward pass that is not the last stage's; as `send` otherwise.
        """
        rows: list[list[Any]] = []
        following: tuple[str, int, int] | None = None
        last = next(((each[1], each[2]) for each in reversed(actions) if each[0]), (0, 0))
        origin = self.seconds(zero)
        for kind, stage, micro_batch, start, end in reversed(actions):
            if kind:
                following = (kind, stage, micro_batch)
                label: tuple[str, int, int] = following
            elif following is not None and self._waits_for_input(*following[:2]):
                label = ("recv", *following[1:])
            else:
                label = ("send", *(following[1:] if following else last))
            began_s, ended_s = (
                max(0.0, round(self.clock.read(each) - origin, 6)) for each in (start, end)
            )
            rows.append([*label, began_s, ended_s])
        rows.reverse()
        return rows

    def _waits_for_input(self, kind: str, stage: int) -> bool:
        return stage > 0 if kind == "F" else kind in "BI" and stage < self.stages - 1
