"""Stop requests of an inference run, from `control.json`, SIGTERM and SIGINT.

Does nothing by itself: the engines poll `StopControl.action`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from workers.runtime.control import GRACE_S, ControlFile, on_signals

ACTIONS = ("stop", "preempt", "pause")


class StopControl:
    """`with StopControl(directory, rank_directory)`: `action` is None or the first request's.

    After `deadline`, of the monotonic clock, the launcher uses force.
    """

    def __init__(self, directory: Path, rank_directory: Path) -> None:
        self._file = ControlFile(directory, rank_directory / "control-done.json", ACTIONS)
        self._action: str | None = None
        self.deadline = float("inf")
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> StopControl:
        self._restore = on_signals(self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    @property
    def action(self) -> str | None:
        """The requested action. Costs one `stat` while nothing changes."""
        if self._action is None and (request := self._file.poll()) is not None:
            self._take(request.action, request.grace_s)
            with contextlib.suppress(OSError):  # a full disk must not prevent the exit
                self._file.mark_done()
        return self._action

    def _take(self, action: str, grace_s: float) -> None:
        if self._action is None:
            self._action, self.deadline = action, time.monotonic() + grace_s

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._take("preempt", GRACE_S)
