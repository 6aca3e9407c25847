"""Collects a rank's stdout and stderr as numbered lines in `logs.jsonl`, in the order of reading.

Each line stores its end offset in the source, so that a successor continues where a killed
supervisor stopped. Memory, disk space and time per call are bounded; what is dropped is recorded as
a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from workers.launcher.rundir import open_to_append, open_to_read
from workers.launcher.shipping import file_space
from workers.launcher.shipping.terminal_lines import complete_length, lines

READ_BYTES = 256 * 1024
SOURCES = {"out": "stdout.log", "err": "stderr.log"}
DEFAULT_LIMIT_MB = 128.0
_TAIL_BYTES = 64 * 1024  # of the end of a log that reached its limit, stored when the rank ends
_COLLECT_S = 0.05  # per call; requests and reports are handled in between
_PROGRESS_S = 10.0  # a line that is overwritten all the time is stored this often
_LAST_LINES = 60
_LIMITED_SLACK = 8 * 1024 * 1024  # once only the end is stored
_LEAST_BYTES = 256 * 1024


def limit_bytes(ranks: int) -> int:
    """Share of one output file in what an attempt may store per node (ORRERY_LOG_MB)."""
    total = float(os.environ.get("ORRERY_LOG_MB") or DEFAULT_LIMIT_MB) * 1024 * 1024
    return max(_LEAST_BYTES, int(total / (2 * max(1, ranks))))


@dataclass
class _Source:
    """A file that a program writes; what is before `offset` was stored or dropped."""

    kind: str
    path: Path
    offset: int = 0
    freed: int = 0
    stored: int = 0  # bytes of its rows
    stored_at: float = field(default_factory=time.monotonic)
    # dropped since the last gap record
    dropped_lines: int = 0
    dropped_bytes: int = 0
    uncounted: bool = False  # lines that were never read are among them
    limited: bool = False  # the limit is reached: only the end is stored
    announced: bool = False
    tail: bytes = b""


class LogCollector:
    """Logs of one rank's folder.

    `sources` maps a short name to a file in it; `last_lines` are the newest lines of `err`. Each
    source may store `limit` bytes, and the unread part of a file may be as long.
    """

    def __init__(
        self, folder: Path, sources: dict[str, str] | None = None, *, limit: int | None = None
    ) -> None:
        self.folder = folder
        self.limit = limit_bytes(1) if limit is None else limit
        self.seq = 0
        self.behind = False  # whether more can be read at once
        self._lock = threading.RLock()
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        names = SOURCES if sources is None else sources
        self._sources = {name: _Source(name, folder / file) for name, file in names.items()}
        self._resume()

    def collect(self, *, final: bool = False, seconds: float | None = None) -> int:
        """Append new lines; `final` includes an unfinished last line. Returns how many lines.

        Reads for at most `seconds` (0.05, and until the end if `final`); `behind` shows whether
        more is left. Raises OSError on a full disk; the lines are then read again by the next call.
        """
        if seconds is None:
            seconds = float("inf") if final else _COLLECT_S
        before, deadline = self.seq, time.monotonic() + seconds
        self.behind = False
        for source in self._sources.values():
            left = False
            self._trim(source)
            while self._read(source, final=final):
                if time.monotonic() > deadline:
                    self.behind = left = True
                    break
            with self._lock:
                if final and not left:
                    self._close_gap(source)
            self._trim(source)
        return self.seq - before

    def trim(self) -> int:
        """Drop and free what exceeds the limits, for a second thread; bytes written so far.

        Raises OSError.
        """
        written = 0
        for source in self._sources.values():
            self._trim(source)
            with contextlib.suppress(FileNotFoundError, PermissionError):
                written += os.stat(source.path).st_size
        return written

    def _trim(self, source: _Source) -> None:
        with self._lock:
            self._skip_backlog(source)
            self._free(source)

    def _read(self, source: _Source, *, final: bool) -> bool:
        """Store or drop up to READ_BYTES; whether there may be more."""
        with self._lock:
            return self._read_part(source, final=final)

    def _read_part(self, source: _Source, *, final: bool) -> bool:
        try:
            with open_to_read(source.path) as file:
                if os.fstat(file.fileno()).st_size < source.offset:
                    source.offset = source.freed = 0  # truncated by someone else
                file.seek(source.offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return False
        full = len(data) == READ_BYTES
        length = complete_length(data, final=final, full=full)
        if length == 0 and b"\r" in data and _due(source):
            length = len(data)
        if length == 0:
            return False
        source.stored_at = time.monotonic()
        data = data[:length]
        if source.limited:
            self._drop(source, data)
        else:
            self._store(source, data)
        source.offset += length
        return full

    def _store(self, source: _Source, data: bytes) -> None:
        rows: list[str] = []
        texts: list[str] = []
        for end, text in lines(data):
            texts.append(text)
            rows.append(self._row(source, len(rows), source.offset + end, text))
        self._append(source, rows)
        if source.kind == "err":
            self.last_lines.extend(texts)
        if source.stored >= self.limit:
            source.limited = True

    def _drop(self, source: _Source, data: bytes) -> None:
        source.dropped_lines += data.count(b"\n")
        source.dropped_bytes += len(data)
        source.tail = (source.tail + data)[-_TAIL_BYTES:]
        if source.announced:
            return
        source.announced = True
        text = (
            f"[orrery: the limit of {_mib(self.limit)} of {source.path.name} is "
            "reached (ORRERY_LOG_MB); what follows is dropped, except for its end]"
        )
        self._append(source, [self._row(source, 0, source.offset, text)])

    def _skip_backlog(self, source: _Source) -> None:
        """Drop what a program has written faster than it can be read, beyond the limit."""
        try:
            size = os.stat(source.path).st_size
        except (FileNotFoundError, PermissionError):
            return
        if size - source.offset <= self._slack(source):
            return
        self.behind = True
        skipped = size - source.offset - min(self.limit, _TAIL_BYTES)
        text = (
            f"[orrery: {skipped:,} bytes of {source.path.name} were dropped: they were written "
            "faster than they can be read]"
        )
        if source.limited:
            source.dropped_bytes += skipped
            source.uncounted, source.tail = True, b""
        else:
            self._append(source, [self._row(source, 0, source.offset + skipped, text)])
        source.offset += skipped

    def _close_gap(self, source: _Source) -> None:
        """Record how much was dropped, then store the end of the output."""
        if not source.dropped_bytes:
            return
        cut = source.tail.find(b"\n") + 1 if source.dropped_bytes > len(source.tail) else 0
        end = source.tail[cut:]
        dropped, count = source.dropped_bytes - len(end), source.dropped_lines - end.count(b"\n")
        least = "at least " if source.uncounted else ""
        text = (
            f"[orrery: {least}{count:,} lines with {dropped:,} bytes of {source.path.name} were "
            f"dropped: the limit of {_mib(self.limit)} was reached (ORRERY_LOG_MB)]"
        )
        shown = [text, *(line for _, line in lines(end))]
        self._append(
            source, [self._row(source, at, source.offset, line) for at, line in enumerate(shown)]
        )
        if source.kind == "err":
            self.last_lines.extend(shown[1:])
        source.dropped_lines = source.dropped_bytes = 0
        source.tail = b""

    def _row(self, source: _Source, ahead: int, end: int, text: str) -> str:
        row = {
            "seq": self.seq + ahead + 1,
            "time": round(time.time(), 3),
            "from": source.kind,
            "end": end,
            "text": text,
        }
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"

    def _append(self, source: _Source, rows: list[str]) -> None:
        """Append rows completely or not at all. Raises OSError."""
        if not rows:
            return
        data, path = "".join(rows).encode("utf-8", "replace"), self.folder / "logs.jsonl"
        with open_to_append(path) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                written = file.write(data)
                if written != len(data):  # a disk that became full in between raises here
                    file.write(data[written:])
            except OSError:
                file.truncate(before)
                raise
        self.seq += len(rows)
        source.stored += len(data)

    def _free(self, source: _Source) -> None:
        """Free the disk space of what was read, once it is as long as the limit."""
        if source.offset - source.freed < self._slack(source):
            return
        if file_space.free(source.path, source.offset):
            source.freed = source.offset
        else:
            source.offset = source.freed = 0

    def _slack(self, source: _Source) -> int:
        """How much of a file may be unread, or read and not freed."""
        return min(self.limit, _LIMITED_SLACK) if source.limited else self.limit

    def _resume(self) -> None:
        """Read number and offsets from the end of an earlier `logs.jsonl`; truncate a torn line."""
        path = self.folder / "logs.jsonl"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return
        with open_to_read(path) as file:
            file.seek(max(0, size - _TAIL_BYTES * len(self._sources)))
            tail = file.read()
        complete = tail.rfind(b"\n") + 1
        if complete < len(tail):
            os.truncate(path, size - (len(tail) - complete))
        for line in tail[:complete].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the first line read may be partial
            self.seq = max(self.seq, row["seq"])
            if row["from"] in self._sources:
                self._sources[row["from"]].offset = row["end"]
            if row["from"] == "err":
                self.last_lines.append(row["text"])
        for source in self._sources.values():
            source.stored = size // len(self._sources)  # the file does not separate them
            source.limited = source.stored >= self.limit


def _due(source: _Source) -> bool:
    return time.monotonic() - source.stored_at > _PROGRESS_S


def _mib(size: int) -> str:
    return f"{size / 1024 / 1024:.3g} MiB"
