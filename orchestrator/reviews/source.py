"""The copy of a reviewed file, and random access to its lines by an index of offsets.

A copy, because a run may still write the file, and garbage collection may delete it. Does not
depend on decisions.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from django.conf import settings

from orchestrator.common.errors import Refusal, invalid
from orchestrator.reviews.models import Review
from workers.contracts.examples.example import LineError
from workers.contracts.examples.formats import guess_format, parse_line
from workers.contracts.specs.data import ExampleFormat

MOST_LINES: Final = 1_000_000
MOST_BYTES: Final = 4 << 30
MOST_LINE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What `copy` found."""

    lines: int
    sha256: str
    index: bytes
    format: ExampleFormat


def folder() -> Path:
    """The folder of all copies."""
    return Path(settings.ENV.home) / "reviews"


def path_of(review: Review) -> Path:
    """The copy of a review's file."""
    return folder() / f"{review.pk}.jsonl"


def copy(source: Path, file: BinaryIO, target: Path, *, format: ExampleFormat | None) -> Copied:
    """Copy the complete lines of an opened file and index them; `source` names it in messages.

    Raises 422 for a file without lines or too large, and for a line that a trainer could not read.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    digest, offsets, size = hashlib.sha256(), array("Q"), 0
    try:
        with file, open(partial, "wb") as out:
            for number, text in enumerate(_limited_lines(file, source), 1):
                if not text.strip() or not text.endswith(b"\n"):
                    if text.strip() and _is_complete(text):
                        text += b"\n"  # a last line without its newline
                    else:
                        continue
                format = _checked(text, format, number, source)
                offsets.append(size)
                size += len(text)
                if len(offsets) > MOST_LINES or size > MOST_BYTES:
                    message = f"{source.name} has more than {MOST_LINES:,} lines or 4 GiB"
                    raise invalid("path", message, "Use a part of the file.")
                digest.update(text)
                out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if not offsets or format is None:
            raise invalid("path", f"{source.name} has no lines", "Use a file with examples.")
        os.replace(partial, target)
    except OSError as error:
        message = f"{source.name} cannot be copied: {error.strerror}"
        raise invalid("path", message, "Use a readable file, and free space on the disk.") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return Copied(len(offsets), digest.hexdigest(), pack(offsets), format)


def pack(offsets: array[int]) -> bytes:
    """The index as it is stored."""
    stored = offsets[:]
    if sys.byteorder == "big":
        stored.byteswap()
    return zlib.compress(stored.tobytes(), 1)


def unpack(index: bytes | memoryview) -> array[int]:
    """The offsets of a stored index."""
    offsets = array("Q")
    offsets.frombytes(zlib.decompress(bytes(index)))
    if sys.byteorder == "big":
        offsets.byteswap()
    return offsets


def read_lines(review: Review, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The original lines with these numbers, from 1. Raises 409 if the copy is lost."""
    offsets = unpack(review.index)
    lines = {}
    with _opened(review) as file:
        for number in numbers:
            if not 1 <= number <= len(offsets):
                continue
            file.seek(offsets[number - 1])
            lines[number] = json.loads(file.readline())
    return lines


def all_lines(review: Review) -> Iterator[tuple[int, dict[str, Any]]]:
    """All original lines in their order, with their numbers."""
    with _opened(review) as file:
        for number, text in enumerate(file, 1):
            yield number, json.loads(text)


def check_content(content: Any, format: ExampleFormat) -> None:
    """Raises 422 for an edited line that a trainer could not read."""
    try:
        parse_line(json.dumps(content), format)
    except LineError as error:
        raise invalid("content", error.message, error.hint) from None


def _limited_lines(file: BinaryIO, source: Path) -> Iterator[bytes]:
    """The file's lines. Raises 422 for one that is longer than 16 MiB, without reading it whole."""
    number = 0
    while text := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(text) > MOST_LINE_BYTES:
            message = f"{source.name}: line {number} is longer than {MOST_LINE_BYTES >> 20} MiB"
            raise invalid("path", message, "Use one example per line.")
        yield text


def _opened(review: Review) -> Any:
    try:
        return open(path_of(review), "rb")
    except OSError:
        raise Refusal(
            "file-elsewhere",
            "The copy of the file is not on this machine",
            409,
            f"Review {review.pk} was begun on another machine, or {path_of(review)} was deleted.",
        ) from None


def _is_complete(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _checked(text: bytes, format: ExampleFormat | None, number: int, source: Path) -> ExampleFormat:
    format = format or guess_format(text)
    if format is None:
        message = f"{source.name}: line {number} has the fields of no example format"
        raise invalid(
            "format", message, 'Use {"messages": […]} or {"prompt", "chosen", "rejected"}.'
        )
    try:
        parse_line(text, format)
    except LineError as error:
        message = f"{source.name}: line {number}: {error.message}"
        raise invalid("format", message, error.hint) from None
    return format
