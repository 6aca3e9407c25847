"""Requests to a running attempt: `control.json` in the run directory, SIGTERM and SIGINT.

Polled once a step; what one rank saw travels to all in the step's own reduction, so that all act on
the same step.
Does not know what the actions do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from workers.contracts.wire.exits import write_atomically

# strongest first
ACTIONS = ("stop", "preempt", "pause", "checkpoint", "profile", "memory_snapshot")
GRACE_S = 20.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Control:
    """`{"action": one of ACTIONS, "id": n}`; an id acts once, over restarts too
    (`control-done.json` remembers it).
    """

    def __init__(self, directory: Path, *, reads_file: bool) -> None:
        self._path = directory / "control.json" if reads_file else None
        self._done_path = directory / "control-done.json"
        self._stamp: tuple[int, int] | None = None
        self._seen: tuple[str, int] | None = None
        self._done = self._last_done()
        self._terminated = self._leaving = False
        self._restore: Callable[[], None] = lambda: None

    def listen(self, *, too_late: Callable[[], None]) -> None:
        """A signal asks to be preempted at the next step.

        A rank that comes to none within GRACE_S, because it waits for peers that are gone, calls
        `too_late` from a
        thread: Python's handler cannot run inside a collective, the interpreter's wake-up pipe is
        written even then.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        watch = threading.Thread(
            target=self._watch, args=(reading, too_late), name="signals", daemon=True
        )
        watch.start()
        handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writing)  # ends the watching thread, unless a signal did
            watch.join(timeout=0.0 if self._terminated else None)

        self._restore = restore

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        self._leaving = True
        self._restore()

    def poll(self) -> list[float]:
        """One number per action, 1 where this rank was asked for it.

        Costs one `stat` while nothing changes.
        """
        flags = [0.0] * len(ACTIONS)
        if self._terminated:
            flags[ACTIONS.index("preempt")] = 1.0
            self._leaving = True
        asked = self._read()
        if asked is not None:
            flags[ACTIONS.index(asked)] = 1.0
        return flags

    def acted(self) -> None:
        """The request that was polled last is done with."""
        if self._seen is not None and self._path is not None:
            self._done = self._seen[1]
            write_atomically(self._done_path, json.dumps({"id": self._done}))
            self._seen = None

    def _read(self) -> str | None:
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            try:
                asked = json.loads(self._path.read_text())
                action, number = str(asked["action"]), int(asked["id"])
            except (OSError, ValueError, KeyError, TypeError):
                return None  # not whole yet, or not ours: looked at again at the next step
            self._stamp = stamp
            self._seen = (action, number) if action in ACTIONS and number > self._done else None
        return self._seen[0] if self._seen else None

    def _last_done(self) -> int:
        try:
            return int(json.loads(self._done_path.read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1

    def _watch(self, reading: int, too_late: Callable[[], None]) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while (number := pipe.read(1)) not in {bytes([each]) for each in _SIGNALS}:
                if not number:
                    return
        time.sleep(GRACE_S)
        if not self._leaving:
            too_late()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True


def strongest(flags: list[float]) -> str | None:
    """The action to take when some ranks' `flags` were summed."""
    return next((action for action, flag in zip(ACTIONS, flags, strict=True) if flag > 0), None)
