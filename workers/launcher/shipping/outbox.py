"""One JSON-lines file as an outbox: whole lines read once, kept in mind until acknowledged, read
again after a rewind.

The file is the durable copy; here are only offsets. Knows neither Redis nor what a line means but
its `seq`.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 256 * 1024
WINDOW_BYTES = 16 * 1024 * 1024  # sent and not acknowledged; beyond it the rest waits on disk


@dataclass(frozen=True)
class Mark:
    """A batch on its way: where it starts and ends in the file, and its last number."""

    start: int
    end: int
    last_seq: int


class Outbox:
    """Reads `path` from `offset`; everything before it is acknowledged up to `acked`."""

    def __init__(self, path: Path, *, offset: int = 0, acked: int = 0) -> None:
        self.path = path
        self.acked = acked
        self.acked_offset = offset
        self.skipped = 0
        self._next = offset
        self._sent: deque[Mark] = deque()

    def read(self) -> tuple[list[dict[str, Any]], Mark] | None:
        """The next whole lines as objects with the mark to give to `sent`; None while there is
        nothing or no room.
        """
        if self._next - self.acked_offset > WINDOW_BYTES:
            return None
        try:
            with open(self.path, "rb") as file:
                file.seek(self._next)
                data = file.read(READ_BYTES)
                while data and b"\n" not in data and len(more := file.read(READ_BYTES)) > 0:
                    data += more  # one very long line
        except FileNotFoundError:
            return None
        end = data.rfind(b"\n") + 1
        if end == 0:
            return None
        rows = [row for line in data[:end].splitlines() if (row := self._parsed(line)) is not None]
        last = max(
            (row["seq"] for row in rows),
            default=self._sent[-1].last_seq if self._sent else self.acked,
        )
        return rows, Mark(self._next, self._next + end, last)

    def sent(self, mark: Mark) -> None:
        self._sent.append(mark)
        self._next = mark.end

    def acknowledge(self, seq: int) -> bool:
        """Forget batches up to this number; True when something moved."""
        moved = False
        while self._sent and self._sent[0].last_seq <= seq:
            mark = self._sent.popleft()
            self.acked, self.acked_offset, moved = mark.last_seq, mark.end, True
        return moved

    def rewind(self) -> None:
        """Send again what is not acknowledged; repeats are dropped by number on the other side."""
        self._sent.clear()
        self._next = self.acked_offset

    @property
    def drained(self) -> bool:
        """Whether every whole line of the file is acknowledged."""
        return not self._sent and self.empty

    @property
    def empty(self) -> bool:
        """Whether every line of the file was sent, acknowledged or not."""
        try:
            return os.stat(self.path).st_size <= self._next or self.read() is None
        except FileNotFoundError:
            return True

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row["seq"], int):
                return row
        except (ValueError, KeyError):
            pass
        self.skipped += 1
        return None
