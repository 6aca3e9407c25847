"""Finds the paths of a spec that lie in runs' folders, and refuses those of hidden runs.

Covers every path of every body, present and future. Does not depend on what the paths hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from django.conf import settings

from orchestrator.common.checked_files import open_resolved, resolved_below
from workers.contracts import Problem

# texts for people, and the program of a script, which is not a path that Orrery opens
_NOT_PATHS = frozenset({"notes", "tags", "name", "command", "env", "secrets", "api_key"})
_LONGEST = 4096


def run_path_problems(
    spec: dict[str, Any],
    *,
    roots: Sequence[Path],
    run_root: Path,
    may_see: Callable[[int], bool],
) -> list[Problem]:
    """One problem per path in the folder of a run that the submitter may not see.

    `roots` are the folders that relative paths may mean. The answer is the same for a hidden run
    and for one that does not exist.
    """
    top = Path(os.path.realpath(run_root))
    problems = []
    for field, text in spec_texts(spec):
        for path in _candidates(text, roots):
            if path == top or (
                path.is_relative_to(top) and not _visible(path.relative_to(top).parts[0], may_see)
            ):
                problems.append(
                    Problem(
                        field=field,
                        message=f"{text} is in no run that you may see",
                        hint="Use a path in one of your team's runs, such as runs/12/checkpoints.",
                    )
                )
                break
    return problems


def runs_named(spec: dict[str, Any], *, roots: Sequence[Path], run_root: Path) -> set[int]:
    """The ids of runs in whose folders paths of the spec lie."""
    top = Path(os.path.realpath(run_root))
    names = {
        path.relative_to(top).parts[0]
        for _, text in spec_texts(spec)
        for path in _candidates(text, roots)
        if path != top and path.is_relative_to(top)
    }
    return {int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 19}


def run_of_path(path: Path, run_root: Path) -> int | None:
    """The id of the run whose folder contains the path, after symlinks."""
    try:
        name = Path(os.path.realpath(path)).relative_to(os.path.realpath(run_root)).parts[0]
    except (ValueError, IndexError, OSError):
        return None
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 19 else None


def in_run_folder(run_id: int, path: str) -> bool:
    """Whether a path that a node reports, relative to its home, is in the folder of this run."""
    parts = PurePosixPath(path).parts
    return parts[:2] == ("runs", str(run_id)) and ".." not in parts and "\0" not in path


def open_file_of_run(run_id: int, path: str) -> BinaryIO | None:
    """Open the file at a reported path; None elsewhere, or outside the run's own folder."""
    root = Path(os.path.realpath(settings.ENV.media_runs))
    # a rank may link out of its folder
    resolved = resolved_below(root.parent / path, root / str(run_id))
    try:
        return None if resolved is None else open_resolved(resolved)
    except OSError:
        return None


def _visible(name: str, may_see: Callable[[int], bool]) -> bool:
    number = int(name) if name.isascii() and name.isdecimal() and len(name) < 19 else None
    return number is not None and may_see(number)


def spec_texts(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`(field, text)` of every text of a spec that may be a path."""
    yield from _texts(spec, "")


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if 0 < len(value) <= _LONGEST and "\0" not in value and "://" not in value:
            yield field, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _NOT_PATHS:
                yield from _texts(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{field}.{index}")


def _candidates(text: str, roots: Sequence[Path]) -> Iterator[Path]:
    """What the text may mean as a path; a single word is not a path into a run's folder."""
    if os.sep not in text and text not in ("runs", ".", ".."):
        # a word may still be a link below a root
        yield from (
            Path(os.path.realpath(root / text)) for root in roots if os.path.islink(root / text)
        )
        return
    try:
        expanded = Path(text).expanduser()
    except RuntimeError:  # no such user
        return
    if expanded.is_absolute():
        yield Path(os.path.realpath(expanded))
        return
    yield from (Path(os.path.realpath(root / expanded)) for root in roots)
