"""Captures the code of a script at its submit: the program's files, and commit plus diff with git.

Reads only; `record` stores the result. A folder that git cannot describe is captured by its files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from orchestrator.runs.code import git
from orchestrator.runs.code.selection import Selection, is_program, program_names, select
from workers.contracts.wire.programs.program_files import ProgramFiles

MOST_DIFF_BYTES: Final = 1 << 20
_SHOWN: Final = 5  # names in a note


@dataclass(frozen=True)
class Captured:
    """The code of a run; without git `commit`, `branch`, `remote` and `diff` are empty."""

    files: ProgramFiles
    folder: str
    start: str = ""
    originals: list[str] = field(default_factory=list)
    git: bool = False
    commit: str = ""
    branch: str = ""
    remote: str = ""
    submodules: dict[str, str] = field(default_factory=dict)
    diff: bytes = b""
    notes: list[str] = field(default_factory=list)


def workdir_of(spec: Mapping[str, Any]) -> str | None:
    """The work folder of a script's spec, as an absolute path; else None."""
    workdir = (spec.get("script") or {}).get("workdir")
    return workdir if isinstance(workdir, str) and workdir.startswith("/") else None


def capture(workdir: str, roots: Sequence[Path]) -> Captured | None:
    """The code in a work folder; None if it is not below an allowed folder."""
    folder = Path(os.path.realpath(workdir))
    allowed = [Path(os.path.realpath(root)) for root in roots]
    if not any(folder.is_relative_to(root) for root in allowed):
        return None
    problem = ""
    try:
        repository = git.find(folder, allowed)
        if repository is not None:
            return _with_git(repository, folder)
    except git.GitProblem as error:
        problem = f"Git was not used: {error}. The files of the folder were captured instead."
    except OSError as error:
        problem = f"Git was not used: {error.strerror}. The files of the folder were captured."
    if folder in allowed:
        return None  # a data root without git is not a program
    chosen = select(folder, program_names(folder))
    notes = [*([problem] if problem else []), *_notes(chosen)]
    return Captured(chosen.program, str(folder), originals=chosen.originals, notes=notes)


def _with_git(repository: git.Repository, folder: Path) -> Captured:
    head = git.head(repository)
    start = folder.relative_to(repository.top).as_posix()
    start = "" if start == "." else start
    with git.work_tree(repository, head.commit) as tree:
        names, submodules = tree.tracked()
        new = [name for name in tree.untracked() if is_program(name)]
        inner = [name for each in submodules for name in program_names(repository.top, each)]
        chosen = select(repository.top, [*names, *new, *inner], start=start)
        diff, lacking = tree.diff([name for name in new if name in chosen.files], MOST_DIFF_BYTES)
    notes = _notes(chosen)
    if not head.commit:
        notes.append("The repository has no commit yet, so the diff has all files.")
    if lacking:
        notes.append(f"The diff leaves out {lacking}; the files themselves are complete.")
    if submodules:
        listed = ", ".join(sorted(submodules)[:_SHOWN])
        notes.append(f"Submodules ({listed}) are captured by their program files.")
    return Captured(
        chosen.program,
        str(repository.top),
        start,
        chosen.originals,
        True,
        head.commit,
        head.branch,
        head.remote,
        submodules,
        diff,
        notes,
    )


def _notes(chosen: Selection) -> list[str]:
    notes = []
    if chosen.left:
        notes.append(
            f"{_listed(chosen.left)} not captured, because of size, number or permissions: "
            "attempts read the original."
        )
    if chosen.outside:
        notes.append(f"{_listed(chosen.outside)} outside the folder: attempts follow the link.")
    if chosen.unlinked:
        notes.append(f"{chosen.unlinked:,} other entries of the folder are not linked.")
    return notes


def _listed(names: Sequence[str]) -> str:
    shown, more = ", ".join(names[:_SHOWN]), len(names) - _SHOWN
    if more > 0:
        return f"{shown} and {more:,} more are"
    return f"{shown} is" if len(names) == 1 else f"{shown} are"
