"""Chooses and reads the files of a program in a folder, within limits.

Other files there, such as data, are only named: nodes link them. Does not use git.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from orchestrator.common.checked_files import open_resolved
from workers.contracts.wire.programs.program_files import (
    MOST_BYTES,
    MOST_FILES,
    MOST_ORIGINALS,
    ProgramFile,
    ProgramFiles,
    is_below,
    link_target,
)

MOST_FILE_BYTES: Final = 1 << 20
_MOST_SEEN: Final = 20_000  # entries of a folder without git
_TEXT = (".py", ".pyi", ".pyx", ".ipynb", ".sh", ".md", ".txt", ".jinja")
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".lock")
_NATIVE = (".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh")
PROGRAM_SUFFIXES: Final = frozenset((*_TEXT, *_SETTINGS, *_NATIVE))
# settings with such words in their names are secrets rather than code: they are linked, not stored
_SECRET_WORDS: Final = ("secret", "credential", "password", "token", "apikey", "api_key", "api-key")
_CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache")
_NEVER: Final = frozenset((".git", ".hg", ".svn", ".venv", "venv", "node_modules", *_CACHES))
_NOT_LINKED: Final = frozenset({".git", "__pycache__"})


@dataclass
class Selection:
    """The files that were read; `left` names files that are too large, too many or unreadable."""

    files: dict[str, ProgramFile] = field(default_factory=dict)
    originals: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # links that leave the folder
    unlinked: int = 0  # beyond the number of originals

    @property
    def program(self) -> ProgramFiles:
        """The files as a program."""
        return ProgramFiles(files=self.files)


def is_program(name: str) -> bool:
    """Whether a file is part of a program by its name; settings that may hold secrets are not."""
    path = PurePosixPath(name)
    if path.suffix in (*_SETTINGS, ".txt"):
        stem = path.stem.lower()
        tokenizer = "tokeniz" in stem or stem in ("special_tokens_map", "added_tokens")
        if not tokenizer and any(word in stem for word in _SECRET_WORDS):
            return False
    return path.suffix in PROGRAM_SUFFIXES


def program_names(folder: Path, below: str = "") -> Iterator[str]:
    """Names of the program files in a folder, sorted; relative to `folder`."""
    seen = 0
    for place, folders, files in os.walk(folder / below):
        folders[:] = sorted(name for name in folders if name not in _NEVER)
        seen += len(folders) + len(files)
        for name in sorted(files):
            relative = (Path(place) / name).relative_to(folder).as_posix()
            if is_program(relative):
                yield relative
        if seen > _MOST_SEEN:
            return


def select(top: Path, names: Iterable[str], *, start: str = "") -> Selection:
    """Read the named files below `top`; those of the folder `start` and programs come first."""
    chosen, total = Selection(), 0
    prefix = f"{start}/" if start else ""
    ordered = sorted(
        set(names), key=lambda name: (not name.startswith(prefix), not is_program(name), name)
    )
    for name in ordered:
        file = _read(top, name, chosen)
        if file is None:
            continue
        if total + len(file.data) > MOST_BYTES or len(chosen.files) >= MOST_FILES:
            chosen.left.append(name)
            continue
        total += len(file.data)
        chosen.files[name] = file
    chosen.originals, chosen.unlinked = _originals(top, chosen.files, start)
    return chosen


def _read(top: Path, name: str, chosen: Selection) -> ProgramFile | None:
    path = top / name
    try:
        name.encode()
    except UnicodeEncodeError:
        chosen.left.append(name.encode(errors="surrogateescape").decode(errors="replace"))
        return None
    if not is_below(name) or not os.path.lexists(path):
        return None  # deleted since the commit
    if path.is_symlink():
        return _link(top, name, chosen)
    try:
        resolved = Path(os.path.realpath(path.parent)) / path.name
        if resolved != top / name:  # through a linked folder
            return None
        with open_resolved(resolved) as file:
            data = file.read(MOST_FILE_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError:
        chosen.left.append(name)
        return None
    if len(data) > MOST_FILE_BYTES:
        chosen.left.append(name)
        return None
    return ProgramFile.of(data, executable=bool(mode & 0o100))


def _link(top: Path, name: str, chosen: Selection) -> ProgramFile | None:
    try:
        text = os.readlink(top / name)
        text.encode()
    except (OSError, UnicodeEncodeError):
        return None
    if is_below(link_target(name, text)):
        return ProgramFile(link=text)
    chosen.outside.append(name)
    return None


def _originals(top: Path, files: Iterable[str], start: str) -> tuple[list[str], int]:
    """Other entries of the folders that hold the program's files, and how many are left out."""
    stored = set(files)
    folders = {str(parent) for name in stored for parent in PurePosixPath(name).parents}
    folders |= {".", *(str(each) for each in PurePosixPath(start).parents), start or "."}
    names_ = []
    for folder in sorted(folders):
        try:
            names = sorted(os.listdir(top / folder))
        except OSError:
            continue
        for name in names:
            relative = (PurePosixPath(folder) / name).as_posix()
            inner = relative in stored or relative in folders or name in _NOT_LINKED
            if not inner and is_below(relative) and relative.isprintable():
                names_.append(relative)
    return names_[:MOST_ORIGINALS], max(0, len(names_) - MOST_ORIGINALS)
