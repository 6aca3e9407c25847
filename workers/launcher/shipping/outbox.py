"""A JSON-lines file as an outbox: sends each complete line, and again until it is acknowledged.

The file is the durable copy; this module holds only offsets. Of a line it reads only `seq`.
`disk_guard` limits the file's disk space from another thread.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.launcher.rundir import open_to_read
from workers.launcher.shipping import file_space

READ_BYTES = 256 * 1024
LONGEST_ROW = 8 * 1024 * 1024  # a longer line is skipped and counted
WINDOW_BYTES = 16 * 1024 * 1024  # sent and not acknowledged; beyond it the rest waits on disk
# the same limit once nothing was acknowledged for STALLED_AFTER_S: the receiver is down, and the
# broker's memory must suffice for the whole outage
STALLED_BYTES = 256 * 1024
STALLED_AFTER_S = 10.0
ATTEMPT_BYTES = 64 * 1024 * 1024  # sent and not acknowledged, of all files of an attempt on a node


@dataclass(frozen=True)
class BatchMark:
    """A batch in flight: its start and end in the file, and its last number.

    `in_long_row`: it ends within a line that is too long and skipped.
    """

    start: int
    end: int
    last_seq: int
    in_long_row: bool = False

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.end - self.start


class Outbox:
    """Reads `path` from `offset`; everything before it is acknowledged, up to number `acked`."""

    def __init__(self, path: Path, *, offset: int = 0, acked: int = 0) -> None:
        self.path = path
        self.acked = acked
        self.acked_offset = offset
        self.share_bytes = WINDOW_BYTES  # of ATTEMPT_BYTES; see `share_window`
        self.skipped = 0
        self.dropped_bytes = 0  # never sent, to limit disk space
        self._freed = 0  # up to here `free` has freed the disk space, as far as the system can
        self._lock = threading.RLock()
        self._next = offset
        self._in_long_row = False
        self._sent: deque[BatchMark] = deque()
        # by the monotonic clock: the last acknowledgement, or the first sending after it
        self._progress = time.monotonic()
        self._again = False  # what is sent next was sent before

    def read(self) -> tuple[list[dict[str, Any]], BatchMark] | None:
        """The next complete lines as objects, with the mark for `sent`; None if there is nothing or
        the window is full.
        """
        with self._lock:
            return self._read()

    def _read(self) -> tuple[list[dict[str, Any]], BatchMark] | None:
        if self._next - self.acked_offset > self._window():
            return None
        try:
            with open_to_read(self.path) as file:
                file.seek(self._next)
                data = file.read(READ_BYTES)
                while (
                    data
                    and b"\n" not in data
                    and len(data) < LONGEST_ROW
                    and len(more := file.read(READ_BYTES)) > 0
                ):
                    data += more  # one very long line
        except FileNotFoundError:
            return None
        if self._in_long_row or (b"\n" not in data and len(data) >= LONGEST_ROW):
            return self._skip_long_row(data)
        end = data.rfind(b"\n") + 1
        if end == 0:
            return None
        rows = [row for line in data[:end].splitlines() if (row := self._parsed(line)) is not None]
        last = max((row["seq"] for row in rows), default=self.last_sent)
        return rows, BatchMark(self._next, self._next + end, last)

    @property
    def last_sent(self) -> int:
        """The number of the last line that was sent or acknowledged."""
        return self._sent[-1].last_seq if self._sent else self.acked

    def sent(self, mark: BatchMark) -> None:
        """Record that the batch was sent."""
        with self._lock:
            if mark.start != self._next:
                return  # what follows it was dropped meanwhile
            if not self._sent and not self._again:
                self._progress = time.monotonic()
            self._sent.append(mark)
            self._next = mark.end
            self.skipped += mark.in_long_row and not self._in_long_row
            self._in_long_row = mark.in_long_row

    def acknowledge(self, seq: int) -> bool:
        """Drop batches up to this number; whether anything was dropped."""
        moved = False
        with self._lock:
            while self._sent and self._sent[0].last_seq <= seq:
                mark = self._sent.popleft()
                self.acked, self.acked_offset, moved = mark.last_seq, mark.end, True
            if moved:
                self._progress, self._again = time.monotonic(), False
        return moved

    def rewind(self) -> None:
        """Send unacknowledged lines again; the receiver drops repeats by number."""
        with self._lock:
            self._again = self._again or bool(self._sent)
            self._sent.clear()
            self._next = self.acked_offset
            self._in_long_row = False

    def stored_bytes(self) -> int:
        """Bytes of the file that take disk space, without those that `free` cannot free."""
        try:
            return max(0, os.stat(self.path).st_size - self._freed)
        except (FileNotFoundError, PermissionError):
            return 0

    def free(self) -> None:
        """Free the disk space of what is acknowledged. Raises OSError.

        Where the file system cannot punch holes, acknowledged lines stay on disk and no longer
        count: dropping others would not free them.
        """
        with self._lock:
            if self.acked_offset > self._freed:
                file_space.punch(self.path, self.acked_offset)
                self._freed = self.acked_offset

    def drop(self, size: int) -> None:
        """Drop the oldest `size` bytes that are not acknowledged, up to a line's end.

        The next batch begins with a higher number, and `sender` reports the numbers between as
        lost. Raises OSError.
        """
        with self._lock:
            with open_to_read(self.path) as file:
                # never beyond the end: what a program appends later would not be sent
                until = min(self.acked_offset + size, os.fstat(file.fileno()).st_size)
                if until <= self.acked_offset:
                    return
                file.seek(until)
                until += file.read(READ_BYTES).find(b"\n") + 1
            self.dropped_bytes += max(0, until - self._next)
            self._sent.clear()
            self.acked_offset = self._next = until
            self._in_long_row = False
            self.free()

    def _window(self) -> int:
        """How many bytes may be sent and not acknowledged."""
        waiting = bool(self._sent) or self._again
        stalled = waiting and time.monotonic() - self._progress > STALLED_AFTER_S
        return min(STALLED_BYTES if stalled else WINDOW_BYTES, self.share_bytes)

    @property
    def drained(self) -> bool:
        """Whether every complete line of the file is acknowledged."""
        return not self._sent and self.empty

    @property
    def empty(self) -> bool:
        """Whether every line of the file was sent, acknowledged or not."""
        try:
            return os.stat(self.path).st_size <= self._next or self.read() is None
        except (FileNotFoundError, PermissionError):
            return True

    def _skip_long_row(self, data: bytes) -> tuple[list[dict[str, Any]], BatchMark] | None:
        """Skip a line that is too long, as far as it has been written."""
        if not data:
            return None
        length = data.find(b"\n") + 1
        end = self._next + (length or len(data))
        return [], BatchMark(self._next, end, self.last_sent, in_long_row=length == 0)

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row["seq"], int):
                return row
        except (ValueError, KeyError):
            pass
        self.skipped += 1
        return None


def share_window(boxes: Collection[Outbox]) -> None:
    """Limit what the files of an attempt have in flight together to ATTEMPT_BYTES.

    A file may exceed its share by one batch.
    """
    for box in boxes:
        box.share_bytes = ATTEMPT_BYTES // len(boxes)
