"""A pipeline in time: what each stage does with each micro-batch in a step, what it waits for, and
its bubble.

Ranks put their moments into the step's own sums; the earliest is everybody's zero. Does not know
schedules.
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
    """Of this rank's stages. Between `begin` and `end`, `action` surrounds F, B, I (input gradient)
    and W, and `waited`
    is told each wait for communication.

    The bubble is the planner's: 1 - sum of seconds in actions / (ranks x span), the span reaching
    from the first
    action of any rank to the last one. PipeDream never flushes: there each rank's span is its own
    turn. `shared_clock`:
    all ranks are on one node and have one clock; else they count from when the last step's sums
    came back to them,
    which they do together (PipeDream's do not: by the time of day there).
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
        self._shared = shared_clock
        self._zero_s = 0.0 if shared_clock or flushes else time.perf_counter() - time.time()
        self._known = shared_clock or not flushes
        self._open = self._inside = False
        self._span: list[Stamp] = []
        self._found: list[Action] = []

    def begin(self) -> None:
        self._open, self._found = True, []
        self._span = [self.clock.now()]

    def end(self) -> None:
        self._open = False
        self._span.append(self.clock.now())

    @contextmanager
    def action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        start, self._inside = self.clock.now(), True
        yield
        self._inside = False
        self._found.append((kind, stage, micro_batch, start, self.clock.now()))

    def longer(self) -> None:
        """The last forward pass goes on until now: the loss, which torch's schedules compute after
        it.
        """
        if self._found and self._found[-1][0] == "F":
            kind, stage, micro_batch, start, _ = self._found[-1]
            self._found[-1] = (kind, stage, micro_batch, start, self.clock.now())

    def waited(self, start: Stamp, end: Stamp) -> None:
        """Waits within actions, of tensor-parallel or sharded parts, are theirs."""
        if self._open and not self._inside:
            self._found.append(("", -1, -1, start, end))

    def row(self, device: torch.device) -> Tensor:
        """`[size, 3]`, fp64: this rank's moments of the step, to be summed over ranks."""
        found = torch.zeros(self.size, _ROW, dtype=torch.float64)
        times = [
            (self.clock.read(start), self.clock.read(end))
            for kind, _, _, start, end in self._found
            if kind
        ]
        if times and self._known:
            busy_s = sum(end - start for start, end in times)
            first, last = times[0][0], times[-1][1]
            if not self.flushes:
                first, last = (self.clock.read(each) for each in self._span)
            found[self.rank] = torch.tensor(
                [first - self._zero_s, last - self._zero_s, busy_s], dtype=torch.float64
            )
        return found.to(device)

    def left(self) -> None:
        """The step's sums are back, on all ranks together."""
        if not self._shared and self.flushes:
            self._zero_s, self._known = time.perf_counter(), True

    def bubble(self, rows: Sequence[float]) -> tuple[float, float, float] | None:
        """Of a step's summed rows: everybody's zero and the span, in seconds, and the bubble's
        share; None where a
        rank's clock was not known yet."""
        began, ended, busy = (rows[place::_ROW] for place in range(_ROW))
        if not all(busy):
            return None
        zero, span_s = min(began), max(ended) - min(began)
        whole_s = len(busy) * span_s
        if not self.flushes:
            whole_s = sum(ended) - sum(began)
        return zero, span_s, 1.0 - sum(busy) / whole_s

    def seconds(self, zero: float) -> float:
        """Everybody's zero by this process's `time.perf_counter`."""
        return self._zero_s + zero

    def actions(self) -> list[Action]:
        """What the step's pipeline was made of, waits between actions included."""
        return [*self._found]

    def drawn(self, found: list[Action], zero: float) -> list[list[Any]]:
        """`[kind, stage, micro-batch, start, end]` in seconds from everybody's zero.

        A wait counts for the action after it: as `recv` before a forward pass that is not the first
        stage's, or a
        backward pass that is not the last one's; as `send` where neither follows.
        """
        rows: list[list[Any]] = []
        following: tuple[str, int, int] | None = None
        last = next(((each[1], each[2]) for each in reversed(found) if each[0]), (0, 0))
        origin = self.seconds(zero)
        for kind, stage, micro_batch, start, end in reversed(found):
            if kind:
                following = (kind, stage, micro_batch)
                told: tuple[str, int, int] = following
            elif following is not None and self._receives(*following[:2]):
                told = ("recv", *following[1:])
            else:
                told = ("send", *(following[1:] if following else last))
            began_s, ended_s = (
                max(0.0, round(self.clock.read(each) - origin, 6)) for each in (start, end)
            )
            rows.append([*told, began_s, ended_s])
        rows.reverse()
        return rows

    def _receives(self, kind: str, stage: int) -> bool:
        return stage > 0 if kind == "F" else kind in "BI" and stage < self.stages - 1
