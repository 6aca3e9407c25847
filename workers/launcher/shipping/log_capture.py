"""Collects a rank's stdout and stderr as numbered lines in `logs.jsonl`, in the order of reading.

Each line stores its end offset in the source, so that a successor continues where a killed
supervisor stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path

READ_BYTES = 256 * 1024
LONGEST_LINE = 8192  # bytes; a longer line is split
SOURCES = {"out": "stdout.log", "err": "stderr.log"}
_TAIL_BYTES = 64 * 1024


class LogCollector:
    """Logs of one rank's folder.

    `sources` maps a short name to a file in it; `last_lines` are the newest lines of `err`.
    """

    def __init__(self, folder: Path, sources: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.sources = SOURCES if sources is None else sources
        self.seq = 0
        self.last_lines: deque[str] = deque(maxlen=60)
        self._offsets = dict.fromkeys(self.sources, 0)
        self._resume()

    def collect(self, *, final: bool = False) -> int:
        """Append new lines; `final` includes an unfinished last line. Returns how many lines."""
        rows: list[str] = []
        for source in self.sources:
            while more := self._lines(source, final=final):
                rows += more
        if rows:
            with open(self.folder / "logs.jsonl", "ab") as file:
                file.write("".join(rows).encode())
        return len(rows)

    def _lines(self, source: str, *, final: bool) -> list[str]:
        try:
            with open(self.folder / self.sources[source], "rb") as file:
                file.seek(self._offsets[source])
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        if not final or len(data) == READ_BYTES:
            complete = data.rfind(b"\n") + 1
            data = data[: complete or (len(data) if len(data) >= LONGEST_LINE else 0)]
        rows, now = [], round(time.time(), 3)
        for line in data.splitlines(keepends=True):
            for start in range(0, len(line), LONGEST_LINE):
                part = line[start : start + LONGEST_LINE]
                self._offsets[source] += len(part)
                self.seq += 1
                text = part.rstrip(b"\r\n").decode("utf-8", "replace").replace("\x00", "�")
                if source == "err":
                    self.last_lines.append(text)
                row = {
                    "seq": self.seq,
                    "time": now,
                    "from": source,
                    "end": self._offsets[source],
                    "text": text,
                }
                rows.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        return rows

    def _resume(self) -> None:
        """Read number and offsets from the end of an earlier `logs.jsonl`; truncate a torn line."""
        path = self.folder / "logs.jsonl"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return
        with open(path, "rb") as file:
            file.seek(max(0, size - _TAIL_BYTES * len(self.sources)))
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
            self._offsets[row["from"]] = max(self._offsets.get(row["from"], 0), row["end"])
            if row["from"] == "err":
                self.last_lines.append(row["text"])
