"""Limits the disk space of what an attempt's programs write, from a thread of its supervisor.

A program can write a gigabyte between two turns of the supervisor's loop. Logs are freed or dropped
here in the same way as there. Points and events may take ORRERY_OUTBOX_MB per attempt and node:
beyond it acknowledged lines are freed, then the oldest of the largest file are dropped; the sender
reports each drop.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

from workers.launcher.shipping.log_capture import LogCollector
from workers.launcher.shipping.outbox import Outbox

DEFAULT_MB: Final = 1024.0
_KEEP: Final = 0.75  # of the limit after a drop, so that drops are rare
_FAST_S, _SLOW_S = 0.02, 0.25  # between two looks, while files grow fast and otherwise
_FAST_BYTES: Final = 8 * 1024 * 1024  # growth between two looks


def limit_bytes() -> int:
    """Disk space of an attempt's points and events on a node (ORRERY_OUTBOX_MB)."""
    return int(float(os.environ.get("ORRERY_OUTBOX_MB") or DEFAULT_MB) * 1024 * 1024)


def limit(boxes: list[Outbox], most: int) -> None:
    """Free and drop lines until the files take at most `most` bytes. Raises OSError."""
    if sum(box.stored_bytes() for box in boxes) <= most:
        return
    for box in boxes:
        box.free()
    excess = sum(box.stored_bytes() for box in boxes) - most
    if excess <= 0:
        return
    largest = max(boxes, key=lambda box: box.stored_bytes())
    size = min(excess + int(most * (1 - _KEEP)), largest.stored_bytes())
    largest.drop(size)


class DiskGuard(threading.Thread):
    """Looks at the files of a running attempt until `close`."""

    def __init__(
        self,
        collectors: Callable[[], list[LogCollector]],
        boxes: Callable[[], list[Outbox]],
    ) -> None:
        super().__init__(name="disk guard", daemon=True)
        self._collectors, self._boxes = collectors, boxes
        self._most = limit_bytes()
        self._closed = threading.Event()

    def run(self) -> None:
        """Look, often while files grow fast."""
        before, wait_s = 0, _SLOW_S
        while not self._closed.wait(wait_s):
            size = 0
            with contextlib.suppress(OSError):  # a full disk; looked at again
                for collector in self._collectors():
                    size += collector.trim()
                boxes = self._boxes()
                limit(boxes, self._most)
                size += sum(box.stored_bytes() for box in boxes)
            wait_s = _FAST_S if size - before > _FAST_BYTES else _SLOW_S
            before = size

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self.is_alive():
            self.join(10)
