"""The answers of a generate run as they stand in its file, each beside the line that it answers, a
page at a time.

Reads both files from where the last page ended; knows the control plane's disk only.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from django.conf import settings

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs.models import Run

_PIECE: Final = 1 << 20
_LONGEST: Final = 1 << 24  # of a line that is shown
_REMEMBERED: Final = 500  # files whose lines are counted


@dataclass(frozen=True, slots=True)
class Answer:
    """`prompt` is None where the input is not on this machine; `asked` is what the line gave: a
    text, messages, ids.
    """

    number: int
    id: Any
    asked: Any
    text: str | None
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Page:
    answers: list[Answer]
    next: str | None


def places(run: Run) -> tuple[Path, Path]:
    """`(input, output)` as this machine has them; a relative output lies in the run's folder."""
    body = run.spec.get("generate") or {}
    folder = Path(settings.ENV.media_runs) / str(run.pk)
    return Path(str(body.get("input") or "")), folder / str(body.get("output") or "")


def is_here(run: Run) -> bool:
    return run.kind == "generate" and places(run)[1].is_file()


def counted(run: Run) -> tuple[int, int | None]:
    """`(answers, lines to answer)`; the second is None where the input is not on this machine."""
    given, made = places(run)
    return _lines(made, whole=True) or 0, _lines(given, whole=False)


def page_of(*, run: Run, after: str | None, limit: int) -> Page:
    """Answers in the order of the input.

    `after` is a page's `next`. Raises 409 where the file is elsewhere.
    """
    given, made = places(run)[0], _made(run)
    number, place, beside = _place(after)
    answers: list[Answer] = []
    with open(made, "rb") as answered, _opened(given) as asked:
        answered.seek(place)
        asked.seek(beside)
        while len(answers) < limit and (line := _line(answered)) is not None:
            number += 1
            answers.append(_answer(number, line, _next_line(asked)))
        end, other = answered.tell(), asked.tell()
        more = _line(answered) is not None
    return Page(answers, f"{number}.{end}.{other}" if more else None)


def pieces(*, run: Run) -> Iterator[bytes]:
    """The file of answers up to its last whole line. Raises 409 where it is elsewhere."""
    rest = b""
    with open(_made(run), "rb") as file:
        while piece := file.read(_PIECE):
            ended, newline, rest = (rest + piece).rpartition(b"\n")
            yield ended + newline


def _made(run: Run) -> Path:
    made = places(run)[1]
    if not made.is_file():
        raise Refusal(
            "file-elsewhere",
            "There are no answers on this machine",
            409,
            f"{made.name} is not written yet, or lies on the node that writes it. Ask again once "
            "the run has "
            "answered a line; a shared run directory (ORRERY_SHARED_RUNS) or a shared data root "
            "brings it here.",
        )
    return made


def _answer(number: int, line: bytes, asked: bytes | None) -> Answer:
    told, given = _object(line), _object(asked or b"")
    forms = [given[name] for name in ("prompt", "messages", "token_ids") if name in given]
    ids, why = list(told.get("token_ids") or []), told.get("finish_reason")
    return Answer(number, told.get("id"), forms[0] if forms else None, told.get("text"), ids, why)


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _place(after: str | None) -> tuple[int, int, int]:
    parts = (after or "0.0.0").split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 19 for part in parts):
        raise invalid(
            "cursor", f"{after!r} is not a page's cursor", "next_cursor of the page before"
        )
    return int(parts[0]), int(parts[1]), int(parts[2])


def _line(file: IO[bytes]) -> bytes | None:
    """The next whole line; None at the end, and for one that is being written."""
    line = file.readline(_LONGEST)
    return line if line.endswith(b"\n") else None


def _next_line(file: IO[bytes]) -> bytes | None:
    """The next line that is not empty: empty ones of the input are not answered."""
    while line := file.readline(_LONGEST):
        if line.strip():
            return line
    return None


def _opened(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError:
        return open(os.devnull, "rb")


# path → (inode, bytes counted, lines in them): what was counted stays true while a file only grows
_counts: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
_lock = threading.Lock()


def _lines(path: Path, *, whole: bool) -> int | None:
    """Lines that are not empty, counting on from where the last call ended; None without a file.
    `whole`: a last line
    without an end is still being written."""
    try:
        with open(path, "rb") as file:
            told = os.fstat(file.fileno())
            with _lock:
                inode, at, lines = _counts.get(str(path), (told.st_ino, 0, 0))
            if inode != told.st_ino or told.st_size < at:
                at = lines = 0
            file.seek(at)
            rest = b""
            while piece := file.read(_PIECE):
                ended, _, rest = (rest + piece).rpartition(b"\n")
                lines += sum(1 for line in ended.split(b"\n") if line.strip())
            end = file.tell() - len(rest)
    except OSError:
        return None
    with _lock:
        _counts[str(path)] = (told.st_ino, end, lines)
        while len(_counts) > _REMEMBERED:
            _counts.popitem(last=False)
    return lines + (not whole and bool(rest.strip()))
