"""Writes points and events of one rank as JSON lines, in a thread so that training never waits.

The format is in `workers.contracts.wire.points`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.contracts.wire.points import encode_number, plain
from workers.metrics.line_files import open_for_append

FLUSH_S = 0.05


class RecorderError(OSError):
    """The run directory cannot be written: a full disk, lost permissions, a deleted folder."""


class Recorder:
    """Appends to `points.jsonl` and `events.jsonl`; `seq` counts from 1 in each file and attempt.

    A line is written within FLUSH_S in one write; an incomplete last line of a killed predecessor
    is removed first. `cost_s` is the total time of the calls of `point` and `event`.
    """

    def __init__(self, directory: Path, *, run: str, attempt: int, rank: int) -> None:
        self.run, self.attempt, self.rank = run, attempt, rank
        self.points = self.events = 0
        self.cost_s = 0.0
        self._pending: deque[tuple[int, dict[str, Any]]] = deque()
        self._error: OSError | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = [
                open_for_append(directory / name) for name in ("points.jsonl", "events.jsonl")
            ]
        except OSError as error:
            raise RecorderError(
                error.errno, f"run directory {directory} cannot be written: {error.strerror}"
            ) from None
        self._thread = threading.Thread(
            target=self._write_until_closed, name="recorder", daemon=True
        )
        self._thread.start()

    def point(self, *, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Record all metrics of one step; numbers that are not finite are written by name.

        Raises RecorderError if an earlier line could not be written.
        """
        started = time.perf_counter()
        self._raise_error()
        self.points += 1
        line = {
            **self._head(self.points),
            "step": step,
            "tokens": tokens,
            "time": time.time(),
            "values": values,
        }
        self._enqueue(0, line)
        self.cost_s += time.perf_counter() - started

    def event(self, type_: str, **data: Any) -> None:
        """Record an event; `data` must be plain JSON data."""
        started = time.perf_counter()
        self._raise_error()
        self.events += 1
        self._enqueue(
            1, {**self._head(self.events), "time": time.time(), "type": type_, "data": data}
        )
        self.cost_s += time.perf_counter() - started

    def close(self) -> None:
        """Write the pending lines and stop the thread.

        Raises RecorderError if anything could not be written.
        """
        if self._thread.is_alive():
            self._closing.set()
            self._wake.set()
            self._thread.join()
            for file in self._files:
                os.close(file)
        self._raise_error()

    def _head(self, seq: int) -> dict[str, Any]:
        return {"run": self.run, "attempt": self.attempt, "rank": self.rank, "seq": seq}

    def _enqueue(self, which: int, line: dict[str, Any]) -> None:
        self._pending.append((which, line))
        if not self._wake.is_set():
            self._wake.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            message = f"the run's points cannot be written: {self._error.strerror or self._error}"
            raise RecorderError(self._error.errno, message)

    def _write_until_closed(self) -> None:
        while True:
            self._wake.wait()
            # a short wait collects the lines of several fast steps for one write
            self._closing.wait(FLUSH_S)
            self._wake.clear()  # first, so that later lines, or a close, wake the thread again
            closing = self._closing.is_set()
            try:
                self._write_pending()
            except OSError as error:
                self._error = error
                return
            if closing:
                return

    def _write_pending(self) -> None:
        lines: tuple[list[bytes], list[bytes]] = ([], [])
        # not until empty: a fast caller would prevent the write
        for _ in range(len(self._pending)):
            which, line = self._pending.popleft()
            lines[which].append(_encoded(line))
        for file, some in zip(self._files, lines, strict=True):
            rest = b"".join(some)
            while rest:
                rest = rest[os.write(file, rest) :]


def _encoded(line: dict[str, Any]) -> bytes:
    if "values" in line:
        line["values"] = {name: encode_number(value) for name, value in line["values"].items()}
    else:
        line["data"] = plain(line["data"])
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def last_attempt(path: Path) -> int:
    """The attempt of the last complete line of `path`, or 0."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["attempt"])
        except (ValueError, KeyError):
            continue
    return 0
