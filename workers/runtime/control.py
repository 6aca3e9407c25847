"""Requests to a running attempt: `control.json` in the run directory, SIGTERM and SIGINT.

`control.json` is `{"action", "id", "grace_s"?}`. An id acts once, also after a restart in the same
directory: `control-done.json` stores the last one. Does not depend on what the actions do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from workers.runtime.exit_codes import write_atomically

GRACE_S = 20.0  # if the request names none
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """One request; after `grace_s` seconds the launcher uses force."""

    action: str
    id: int
    grace_s: float


class ControlFile:
    """Reads `control.json`; `done_path` stores the id of the last request that was handled."""

    def __init__(self, directory: Path, done_path: Path, actions: Sequence[str]) -> None:
        self._path, self._done_path, self._actions = directory / "control.json", done_path, actions
        self._stamp: tuple[int, int] | None = None
        self._pending: ControlRequest | None = None
        self._done = self._last_done()

    def poll(self) -> ControlRequest | None:
        """The request that is not done yet. Costs one `stat` while the file is unchanged."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            try:
                document = json.loads(self._path.read_bytes())
                request = ControlRequest(
                    str(document["action"]),
                    int(document["id"]),
                    float(document.get("grace_s", GRACE_S)),
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return None  # incomplete or foreign: read again at the next poll
            self._stamp = stamp
            new = request.action in self._actions and request.id > self._done
            self._pending = request if new else None
        return self._pending

    def mark_done(self) -> None:
        """Store that the pending request was handled. Raises OSError."""
        if self._pending is not None:
            self._done, self._pending = self._pending.id, None
            write_atomically(self._done_path, json.dumps({"id": self._done}))

    def _last_done(self) -> int:
        try:
            return int(json.loads(self._done_path.read_bytes())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1


def on_signals(handle: Callable[[int, FrameType | None], None]) -> Callable[[], None]:
    """Install `handle` for SIGNALS in the main thread; the result restores the old handlers."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    previous = {number: signal.signal(number, handle) for number in SIGNALS}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore
