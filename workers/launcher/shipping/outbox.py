"""A JSON-lines file as an outbox: sends each complete line, and again until it is acknowledged.

The file is the durable copy; this module holds only offsets. Of a line it reads only `seq`.
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
class BatchMark:
    """A batch in flight: its start and end in the file, and its last number."""

    start: int
    end: int
    last_seq: int


class Outbox:
    """Reads `path` from `offset`; everything before it is acknowledged, up to number `acked`."""

    def __init__(self, path: Path, *, offset: int = 0, acked: int = 0) -> None:
        self.path = path
        self.acked = acked
        self.acked_offset = offset
        self.skipped = 0
        self._next = offset
        self._sent: deque[BatchMark] = deque()

    def read(self) -> tuple[list[dict[str, Any]], BatchMark] | None:
        """The next complete lines as objects, with the mark for `sent`; None if there is nothing or
        the window is full.
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
        return rows, BatchMark(self._next, self._next + end, last)

    def sent(self, mark: BatchMark) -> None:
        """Record that the batch was sent."""
        self._sent.append(mark)
        self._next = mark.end

    def acknowledge(self, seq: int) -> bool:
        """Drop batches up to this number; whether anything was dropped."""
        moved = False
        while self._sent and self._sent[0].last_seq <= seq:
            mark = self._sent.popleft()
            self.acked, self.acked_offset, moved = mark.last_seq, mark.end, True
        return moved

    def rewind(self) -> None:
        """Send unacknowledged lines again; the receiver drops repeats by number."""
        self._sent.clear()
        self._next = self.acked_offset

    @property
    def drained(self) -> bool:
        """Whether every complete line of the file is acknowledged."""
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
