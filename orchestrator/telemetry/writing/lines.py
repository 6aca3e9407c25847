"""Stores log lines: each line of a writer once, in chunks as they arrived.

Runs inside the caller's transaction with the runs locked. `reading.logs` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from orchestrator.common import live
from orchestrator.common.clock import from_unix
from orchestrator.telemetry.models import LogChunk
from orchestrator.telemetry.packing import ranges
from orchestrator.telemetry.writing.cursors import Writer, cursors_save, get_cursors, parse_ranges

MAX_LINE: Final = 16_384  # characters; a progress bar without line ends would grow without limit
_FRAME_LINES: Final = 200
_MAX_LIVE_LINES: Final = 1000  # per rank and tick; the log itself has the rest


@dataclass(frozen=True, slots=True)
class Lines:
    """Consecutive lines; `first_seq` numbers the first, `time` (Unix seconds) is the last's."""

    first_seq: int
    time: float
    lines: list[str]


@dataclass(frozen=True, slots=True)
class StoredLines:
    """New lines of one writer; all numbers up to `complete_to` have arrived."""

    writer: Writer
    new: list[tuple[int, str]]  # (number, text)
    known: int
    complete_to: int
    time: float = 0.0  # Unix seconds of the newest line


def lines_write(incoming: Iterable[tuple[Writer, Lines]]) -> list[StoredLines]:
    """Store the lines that have not arrived before."""
    parts: dict[Writer, list[Lines]] = {}
    for writer, lines in incoming:
        parts.setdefault(writer, []).append(lines)
    cursors = get_cursors(parts.keys(), "logs")
    stored, chunks, changed = [], [], []
    for writer in sorted(parts):
        cursor = cursors[writer]
        known = parse_ranges(cursor)
        new: list[tuple[int, str]] = []
        repeated = 0
        for part in parts[writer]:
            seqs = np.arange(part.first_seq, part.first_seq + len(part.lines), dtype=np.int64)
            fresh = ranges.unknown(known, seqs)
            known = ranges.add(known, seqs[fresh])
            repeated += int((~fresh).sum())
            for first, texts in _consecutive(
                seqs[fresh].tolist(), [part.lines[i] for i in np.flatnonzero(fresh)]
            ):
                new += list(enumerate(texts, first))
                chunks.append(
                    LogChunk(
                        run_id=writer.run_id,
                        attempt=writer.attempt,
                        rank=writer.rank,
                        first_seq=first,
                        lines=len(texts),
                        time=from_unix(part.time),
                        text="\n".join(texts),
                    )
                )
        if new:
            cursor.ranges = json.dumps(known, separators=(",", ":"))
            cursor.last_seq = max(cursor.last_seq, max(number for number, _ in new))
            cursor.last_time = max(part.time for part in parts[writer])
            changed.append(cursor)
        newest = max(part.time for part in parts[writer])
        stored.append(StoredLines(writer, new, repeated, ranges.complete_to(known), newest))
    LogChunk.objects.bulk_create(chunks)
    cursors_save(changed)
    return stored


def log_frames(stored: Iterable[StoredLines]) -> list[live.NewFrame]:
    """`log` frames for the runs' topics; `skipped` counts the earlier lines that are not sent."""
    frames = []
    for item in stored:
        lines = item.new[-_MAX_LIVE_LINES:]
        skipped = len(item.new) - len(lines)
        for start in range(0, len(lines), _FRAME_LINES):
            body: dict[str, Any] = {
                "attempt": item.writer.attempt,
                "rank": item.writer.rank,
                "time": item.time,
                "lines": lines[start : start + _FRAME_LINES],
            }
            if skipped and start == 0:
                body["skipped"] = skipped
            frames.append(live.NewFrame(f"run:{item.writer.run_id}", "log", body))
    return frames


def clean(text: str) -> str:
    """The line as both databases can store it: no line ends, zero bytes or lone surrogates."""
    text = (
        text[:MAX_LINE].replace("\r\n", "\n").rstrip("\n").replace("\n", "⏎").replace("\x00", "�")
    )
    return text.encode("utf-8", "replace").decode()


def _consecutive(seqs: list[int], texts: list[str]) -> Iterable[tuple[int, list[str]]]:
    """Split into runs of consecutive numbers `(first number, cleaned texts)`."""
    start = 0
    for i in range(1, len(seqs) + 1) if seqs else ():
        if i == len(seqs) or seqs[i] != seqs[i - 1] + 1:
            yield seqs[start], [clean(text) for text in texts[start:i]]
            start = i
