"""What an inference run is asked while it goes: `control.json` in its run directory, SIGTERM and
SIGINT.

Looked at by whoever asks `wish`; does nothing by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from workers.contracts.wire.exits import write_atomically

GRACE_S = 20.0  # where nobody said how long
WISHES = ("stop", "preempt", "pause")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Orders:
    """`with Orders(directory, folder)`: `wish` is None, or the word that came first; by `deadline`
    others use force.

    An order's id acts once on each rank: `control-done.json` in the rank's folder remembers it for
    who is started again
    in the same directory.
    """

    def __init__(self, directory: Path, folder: Path) -> None:
        self._path, self._done_path = directory / "control.json", folder / "control-done.json"
        self._seen: tuple[int, int] | None = None
        self._word: str | None = None
        self.deadline = float("inf")  # of the monotonic clock
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> Orders:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
            self._restore = lambda: _give_back(before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._restore()

    @property
    def wish(self) -> str | None:
        """Costs one `stat` while nothing changes."""
        if self._word is None and (stamp := self._stamp()) != self._seen:
            try:
                asked = json.loads(self._path.read_bytes())
                word, number, grace_s = (
                    str(asked["action"]),
                    int(asked["id"]),
                    float(asked.get("grace_s", GRACE_S)),
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return None  # not whole yet, or not ours: looked at again
            self._seen = stamp
            if word in WISHES and number > self._done():
                self._take(word, grace_s)
                with contextlib.suppress(OSError):  # a full disk is no reason not to end
                    write_atomically(self._done_path, json.dumps({"id": number}))
        return self._word

    def _done(self) -> int:
        try:
            return int(json.loads(self._done_path.read_bytes())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1

    def _take(self, word: str, grace_s: float) -> None:
        if self._word is None:
            self._word, self.deadline = word, time.monotonic() + grace_s

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._take("preempt", GRACE_S)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino


def _give_back(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
