"""The answer file: one line per input line in input order, so the line count is the progress.

A restarted run truncates an unfinished last line and continues after it: nothing is repeated or
lost. Does not depend on tokens or the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.runtime.exit_codes import UserError


class AnswerFile:
    """`done` answers are in the file. Raises UserError for another run's answers.

    The fingerprint covers everything that determines the answers. It is stored in a hidden file
    next
    to them, so that answers of other weights, prompts or parameters are never continued.
    """

    def __init__(
        self, path: Path, ids: Sequence[Any], *, fingerprint: str, field: str = "generate.output"
    ) -> None:
        self.path, self.ids, self.field = path, ids, field
        self._early: dict[int, bytes] = {}  # finished before an earlier line's answer
        mark = path.with_name(f".{path.name}.made-by")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines, size = _complete_lines(path)
            if lines and mark.is_file() and mark.read_text(encoding="utf-8") != fingerprint:
                raise UserError(
                    f"{self.field}: {path} holds answers of another spec or input; {_MOVE}"
                )
            self._check(lines)
            temporary = mark.with_name(f"{mark.name}.{os.getpid()}")
            temporary.write_text(fingerprint, encoding="utf-8")
            os.replace(temporary, mark)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, size)
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror}"
            raise UserError(f"{self.field}: {message}; give a writable path") from None
        self.done = len(lines)

    def write(self, index: int, answer: dict[str, Any]) -> None:
        """Add the answer to input line `index`, from 0; it is written after all earlier ones."""
        self._early[index] = json.dumps(answer).encode() + b"\n"
        ready = b""
        while self.done in self._early:
            ready += self._early.pop(self.done)
            self.done += 1
        while ready:
            ready = ready[os.write(self._file, ready) :]

    def close(self) -> None:
        """Sync and close the file."""
        os.fsync(self._file)
        os.close(self._file)

    def _check(self, lines: Sequence[bytes]) -> None:
        if len(lines) > len(self.ids):
            message = f"holds {len(lines)} answers, the input {len(self.ids)} lines"
            raise UserError(f"{self.field}: {self.path} {message}; {_MOVE}")
        for number, (text, expected) in enumerate(zip(lines, self.ids, strict=False), 1):
            try:
                id = json.loads(text)["id"]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.field}: {self.path} line {number} is not an answer; {_MOVE}"
                ) from None
            if id != expected:
                message = f"line {number} answers id {id!r}, the input has {expected!r} there"
                raise UserError(f"{self.field}: {self.path} {message}; {_MOVE}")


_MOVE = "move it away, or give another output"


def compute_fingerprint(*parts: Any) -> str:
    """SHA-256 of JSON data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _complete_lines(path: Path) -> tuple[list[bytes], int]:
    data = path.read_bytes() if path.exists() else b""
    data = data[: data.rfind(b"\n") + 1]
    return data.splitlines(), len(data)
