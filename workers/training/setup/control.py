"""Control requests of a training attempt, polled once per step.

What one rank saw reaches all ranks in the step's own reduction, so that all act on the same step.
Does not depend on what the actions do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from workers.runtime.control import GRACE_S, SIGNALS, ControlFile, on_signals

# strongest first
ACTIONS = ("stop", "preempt", "pause", "checkpoint", "profile", "memory_snapshot")


class Control:
    """Requests of the control file and of signals, as one flag per action."""

    def __init__(self, directory: Path, *, reads_file: bool) -> None:
        done_path = directory / "control-done.json"
        self._file = ControlFile(directory, done_path, ACTIONS) if reads_file else None
        self._terminated = self._leaving = False
        self._restore: Callable[[], None] = lambda: None

    def listen(self, *, too_late: Callable[[], None]) -> None:
        """From now on a signal requests preemption at the next step.

        If no step comes within GRACE_S, because the rank waits for lost peers, a thread calls
        `too_late`: Python's handler cannot run inside a collective, but the interpreter still
        writes its wake-up pipe.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        watch = threading.Thread(
            target=self._watch, args=(reading, too_late), name="signals", daemon=True
        )
        watch.start()
        restore_handlers = on_signals(self._on_signal)
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup)
            restore_handlers()
            os.close(writing)  # ends the watching thread, unless a signal did
            watch.join(timeout=0.0 if self._terminated else None)

        self._restore = restore

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._leaving = True
        self._restore()

    def poll(self) -> list[float]:
        """One number per action, 1 if it was requested of this rank.

        Costs one `stat` while nothing changes.
        """
        flags = [0.0] * len(ACTIONS)
        if self._terminated:
            flags[ACTIONS.index("preempt")] = 1.0
            self._leaving = True
        request = self._file.poll() if self._file else None
        if request is not None:
            flags[ACTIONS.index(request.action)] = 1.0
        return flags

    def mark_done(self) -> None:
        """Store that the request of the last poll was handled."""
        if self._file is not None:
            self._file.mark_done()

    def _watch(self, reading: int, too_late: Callable[[], None]) -> None:
        stop_bytes = {bytes([number]) for number in SIGNALS}
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while (received := pipe.read(1)) not in stop_bytes:
                if not received:
                    return
        time.sleep(GRACE_S)
        if not self._leaving:
            too_late()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True


def strongest(flags: list[float]) -> str | None:
    """The strongest action of the summed `flags` of all ranks."""
    return next((action for action, flag in zip(ACTIONS, flags, strict=True) if flag > 0), None)
