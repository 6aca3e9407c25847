"""The file of answers: a line for each line of the input, in its order, so that the number of lines
says what is done.

What a killed run wrote stays, an unfinished last line is cut off, and the run goes on after it:
nothing is repeated and
nothing lost. Knows no tokens and no engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.runtime.exits import UserError


class Answers:
    """Opened with the ids of the input; `done` answers are in the file. Raises UserError for
    another run's answers.

    `made_by` stands for everything that decides the answers; it lies in a hidden file beside them,
    so that answers of
    other weights, prompts or parameters are never gone on with.
    """

    def __init__(
        self, path: Path, ids: Sequence[Any], *, made_by: str, field: str = "generate.output"
    ) -> None:
        self.path, self.ids, self.field = path, ids, field
        self._early: dict[int, bytes] = {}  # ended before an answer that stands before them
        mark = path.with_name(f".{path.name}.made-by")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept, whole_bytes = _whole_lines(path)
            if kept and mark.is_file() and mark.read_text(encoding="utf-8") != made_by:
                raise UserError(
                    f"{self.field}: {path} holds answers of another spec or input; {_MOVE}"
                )
            self._check(kept)
            beside = mark.with_name(f"{mark.name}.{os.getpid()}")
            beside.write_text(made_by, encoding="utf-8")
            os.replace(beside, mark)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, whole_bytes)
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror}"
            raise UserError(f"{self.field}: {message}; give a place where you may write") from None
        self.done = len(kept)

    def give(self, place: int, answer: dict[str, Any]) -> None:
        """The answer to input line `place`, from 0; it is written once those before it are."""
        self._early[place] = json.dumps(answer).encode() + b"\n"
        ready = b""
        while self.done in self._early:
            ready += self._early.pop(self.done)
            self.done += 1
        while ready:
            ready = ready[os.write(self._file, ready) :]

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def _check(self, kept: Sequence[bytes]) -> None:
        if len(kept) > len(self.ids):
            message = f"holds {len(kept)} answers, the input {len(self.ids)} lines"
            raise UserError(f"{self.field}: {self.path} {message}; {_MOVE}")
        for number, (text, wanted) in enumerate(zip(kept, self.ids, strict=False), 1):
            try:
                found = json.loads(text)["id"]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.field}: {self.path} line {number} is no answer; {_MOVE}"
                ) from None
            if found != wanted:
                message = f"line {number} answers id {found!r}, the input has {wanted!r} there"
                raise UserError(f"{self.field}: {self.path} {message}; {_MOVE}")


_MOVE = "move it away, or give another output"


def fingerprint(*parts: Any) -> str:
    """Of plain JSON data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    data = path.read_bytes() if path.exists() else b""
    data = data[: data.rfind(b"\n") + 1]
    return data.splitlines(), len(data)
