"""What a reader returns: runs with their configuration, points, log lines and media."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orrery_cli.errors import CliError

# what damaged or hostile records raise while they are read
DAMAGES = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
    struct.error,
)


class SourceError(CliError):
    """A file that cannot be read: which one, where in it, and why."""

    def __init__(self, path: Path, where: str, message: str, hint: str = "") -> None:
        super().__init__(f"{path}{f', {where}' if where else ''}: {message}", hint)


@dataclass
class SourceRun:
    """A run of another tracker; `key` identifies it wherever its files lie.

    `points` are `{seq, step, time, values}`, `lines` are `{seq, time, text}`, `media` are items of
    `POST runs/{id}/media`. `skipped` counts, by kind, what Orrery does not show.
    """

    tool: str
    key: str
    name: str
    experiment: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)
    requirements: str = ""
    points: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    media: list[dict[str, Any]] = field(default_factory=list)
    status: str = "finished"
    reason: str = ""
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        """The tag by which a second import recognizes the run."""
        digest = hashlib.sha256(f"{self.tool}:{self.key}".encode()).hexdigest()[:16]
        return f"{self.tool}:{digest}"

    def skip(self, kind: str) -> None:
        """Count something that is left out."""
        self.skipped[kind] = self.skipped.get(kind, 0) + 1


def number_or_name(value: float) -> float | str:
    """The number, or the text that the server reads as one that is not finite."""
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def is_number(value: object) -> bool:
    """Whether a value is a point's number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, value)` of all leaves of nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def is_below(path: Path, root: Path) -> bool:
    """Whether a path lies in a resolved folder, also after its links: files are not trusted."""
    return path.resolve().is_relative_to(root)


def read_file(path: Path, root: Path) -> bytes:
    """The bytes of a file below the resolved folder `root`. Raises SourceError."""
    if not is_below(path, root):
        raise SourceError(
            path, "", f"it is a link to a file outside {root}", "Copy the file there."
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(path, "", error.strerror or str(error)) from None


def read_text(path: Path, root: Path) -> str:
    """A file's text; bytes that are not UTF-8 are replaced. Raises SourceError."""
    return read_file(path, root).decode("utf-8", "replace")


def unreadable(path: Path, place: int, error: Exception) -> SourceError:
    """The error of a record that does not follow its format."""
    text = str(error) if isinstance(error, ValueError) else f"unexpected content ({error!r})"
    return SourceError(path, f"record {place}", text)
