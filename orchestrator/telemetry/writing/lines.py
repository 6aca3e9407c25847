"""The way of log lines into the database: each line of a writer once, in chunks as they came.

Runs inside the caller's transaction with the runs locked. Reading is in `logs`.
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
from orchestrator.telemetry.writing.cursors import Writer, cursors_of, cursors_save, ranges_of

LONGEST_LINE: Final = 16_384  # characters; a progress bar without line ends would grow for ever
_FRAME_LINES: Final = 200
_MOST_LIVE_LINES: Final = 1000  # of a rank in one tick; the rest is read from the log itself


@dataclass(frozen=True, slots=True)
class Lines:
    """Consecutive lines, the first numbered `first_seq`; `time` in Unix seconds is the newest
    one's.
    """

    first_seq: int
    time: float
    lines: list[str]


@dataclass(frozen=True, slots=True)
class StoredLines:
    writer: Writer
    new: list[tuple[int, str]]  # (number, text)
    known: int
    complete_to: int


def lines_write(incoming: Iterable[tuple[Writer, Lines]]) -> list[StoredLines]:
    """Stores the lines that have not arrived before."""
    parts: dict[Writer, list[Lines]] = {}
    for writer, lines in incoming:
        parts.setdefault(writer, []).append(lines)
    cursors = cursors_of(parts.keys(), "logs")
    stored, chunks, changed = [], [], []
    for writer in sorted(parts):
        cursor = cursors[writer]
        known = ranges_of(cursor)
        new: list[tuple[int, str]] = []
        repeated = 0
        for part in parts[writer]:
            seqs = np.arange(part.first_seq, part.first_seq + len(part.lines), dtype=np.int64)
            fresh = ranges.unknown(known, seqs)
            known = ranges.add(known, seqs[fresh])
            repeated += int((~fresh).sum())
            for first, texts in _runs(
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
        stored.append(StoredLines(writer, new, repeated, ranges.complete_to(known)))
    LogChunk.objects.bulk_create(chunks)
    cursors_save(changed)
    return stored


def log_frames(stored: Iterable[StoredLines]) -> list[live.New]:
    """`log` frames for the runs' topics; `skipped` tells how many lines before them were too many
    to send.
    """
    frames = []
    for item in stored:
        lines = item.new[-_MOST_LIVE_LINES:]
        skipped = len(item.new) - len(lines)
        for start in range(0, len(lines), _FRAME_LINES):
            body: dict[str, Any] = {
                "attempt": item.writer.attempt,
                "rank": item.writer.rank,
                "lines": lines[start : start + _FRAME_LINES],
            }
            if skipped and start == 0:
                body["skipped"] = skipped
            frames.append(live.New(f"run:{item.writer.run_id}", "log", body))
    return frames


def clean(text: str) -> str:
    """One line as both databases can keep it: no line ends, no zero bytes, no halves of characters,
    not endless.
    """
    text = (
        text[:LONGEST_LINE]
        .replace("\r\n", "\n")
        .rstrip("\n")
        .replace("\n", "⏎")
        .replace("\x00", "�")
    )
    return text.encode("utf-8", "replace").decode()


def _runs(seqs: list[int], texts: list[str]) -> Iterable[tuple[int, list[str]]]:
    """Consecutive stretches `(first number, cleaned texts)`."""
    start = 0
    for i in range(1, len(seqs) + 1) if seqs else ():
        if i == len(seqs) or seqs[i] != seqs[i - 1] + 1:
            yield seqs[start], [clean(text) for text in texts[start:i]]
            start = i
