"""The answers in a generate run's output file with their input lines, one page at a time.

Reads both files from where the last page ended, on the control plane's own disk.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from django.conf import settings

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs.datasets.resolve import paths_of_texts
from orchestrator.runs.models import Run
from orchestrator.runs.outputs.output_files import open_output_file

_CHUNK: Final = 1 << 20
_LONGEST: Final = 1 << 24  # bytes of a line
_CACHED_COUNTS: Final = 500  # files


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    `prompt`: text, messages or token ids; None if the input is not on this machine.
    """

    number: int
    id: Any
    prompt: Any
    text: str | None
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Page:
    """Answers, and the cursor of the next page."""

    answers: list[Answer]
    next: str | None


def file_paths(run: Run) -> tuple[Path, Path]:
    """`(input, output)` on this machine; a relative output is in the run's folder."""
    body = run.spec.get("generate") or {}
    folder = Path(settings.ENV.media_runs) / str(run.pk)
    output = folder / str(body.get("output") or "")
    given = str(body.get("input") or "")
    return Path(paths_of_texts(run.spec).get(given, given)), output


def is_available(run: Run) -> bool:
    """Whether the answers are on this machine."""
    if run.kind != "generate":
        return False
    try:
        open_output_file(file_paths(run)[1]).close()
    except OSError:
        return False
    return True


def count_answers(run: Run) -> tuple[int, int | None]:
    """`(answers, input lines)`; the second is null if the input is not on this machine."""
    prompts, answers = file_paths(run)
    return _count_lines(answers, complete_only=True) or 0, _count_lines(
        prompts, complete_only=False
    )


def get_page(*, run: Run, after: str | None, limit: int) -> Page:
    """Answers in input order.

    `after` is a page's `next`. Raises 409 if the file is on another machine.
    """
    number, output_offset, input_offset = _parse_cursor(after)
    answers: list[Answer] = []
    input_path = file_paths(run)[0]
    with _open_output(run) as output_file, _open_or_empty(input_path) as input_file:
        output_file.seek(output_offset)
        input_file.seek(input_offset)
        while len(answers) < limit and (line := _complete_line(output_file)) is not None:
            number += 1
            answers.append(_answer(number, line, _next_line(input_file)))
        end, input_end = output_file.tell(), input_file.tell()
        more = _complete_line(output_file) is not None
    return Page(answers, f"{number}.{end}.{input_end}" if more else None)


def read_chunks(*, run: Run) -> Iterator[bytes]:
    """The output file up to its last complete line. Raises 409 if it is on another machine."""
    rest = b""
    with _open_output(run) as file:
        while chunk := file.read(_CHUNK):
            complete, newline, rest = (rest + chunk).rpartition(b"\n")
            yield complete + newline


def _open_output(run: Run) -> BinaryIO:
    path = file_paths(run)[1]
    try:
        return open_output_file(path)
    except OSError:
        raise Refusal(
            "file-elsewhere",
            "There are no answers on this machine",
            409,
            f"{path.name} is not written yet, or is on the node that writes it. Try again after "
            "the "
            "first answer; a shared run directory (ORRERY_SHARED_RUNS) or a shared data root "
            "makes it available here.",
        ) from None


def _answer(number: int, output_line: bytes, input_line: bytes | None) -> Answer:
    output, source = _json_object(output_line), _json_object(input_line or b"")
    prompts = [source[name] for name in ("prompt", "messages", "token_ids") if name in source]
    return Answer(
        number,
        output.get("id"),
        prompts[0] if prompts else None,
        output.get("text"),
        list(output.get("token_ids") or []),
        output.get("finish_reason"),
    )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parse_cursor(after: str | None) -> tuple[int, int, int]:
    parts = (after or "0.0.0").split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 19 for part in parts):
        raise invalid(
            "cursor", f"{after!r} is not a cursor", "Use next_cursor of the previous page."
        )
    return int(parts[0]), int(parts[1]), int(parts[2])


def _complete_line(file: IO[bytes]) -> bytes | None:
    """The next complete line; None at the end, and for a line that is still being written."""
    line = file.readline(_LONGEST)
    return line if line.endswith(b"\n") else None


def _next_line(file: IO[bytes]) -> bytes | None:
    """The next non-empty line: empty input lines have no answer."""
    while line := file.readline(_LONGEST):
        if line.strip():
            return line
    return None


def _open_or_empty(path: Path) -> IO[bytes]:
    try:
        return open_output_file(path)
    except OSError:
        return open(os.devnull, "rb")


# path → (inode, bytes counted, lines in them); stays valid while the file only grows
_counts: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
_lock = threading.Lock()


def _count_lines(path: Path, *, complete_only: bool) -> int | None:
    """Non-empty lines, counted from where the last call ended; None without a file.

    `complete_only` ignores a last line without a newline.
    """
    try:
        with open_output_file(path) as file:
            stat = os.fstat(file.fileno())
            with _lock:
                inode, offset, lines = _counts.get(str(path), (stat.st_ino, 0, 0))
            if inode != stat.st_ino or stat.st_size < offset:
                offset = lines = 0
            file.seek(offset)
            rest = b""
            while chunk := file.read(_CHUNK):
                complete, _, rest = (rest + chunk).rpartition(b"\n")
                lines += sum(1 for line in complete.split(b"\n") if line.strip())
            end = file.tell() - len(rest)
    except OSError:
        return None
    with _lock:
        _counts[str(path)] = (stat.st_ino, end, lines)
        while len(_counts) > _CACHED_COUNTS:
            _counts.popitem(last=False)
    return lines + (not complete_only and bool(rest.strip()))
