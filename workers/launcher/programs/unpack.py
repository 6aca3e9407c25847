"""Unpacks the program of a script run into its attempt's own folder.

Later edits of the original folder therefore do not change a retry. Does not start programs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from workers.contracts.wire.node_messages import LaunchOrder
from workers.contracts.wire.programs.program_files import ProgramOrder
from workers.launcher.rundir import RunDir

FOLDER: Final = "code"  # in the attempt's directory


def work_folder(order: LaunchOrder, run_dir: RunDir) -> Path | None:
    """Where the program starts; None if the order has no program."""
    if order.program is None:
        return None
    return run_dir.path / FOLDER / order.program.start


def command_of(order: LaunchOrder, run_dir: RunDir, command: list[str]) -> list[str]:
    """The command with a program file of the original folder replaced by its unpacked copy."""
    program = order.program
    if program is None or not command or not os.path.isabs(command[0]):
        return command
    with contextlib.suppress(ValueError):
        name = Path(command[0]).relative_to(program.folder)
        if (run_dir.path / FOLDER / name).exists():
            return [str(run_dir.path / FOLDER / name), *command[1:]]
    return command


def unpack_program(order: LaunchOrder, run_dir: RunDir) -> None:
    """Create `code` in the run directory. Raises ValueError if damaged, OSError."""
    program = order.program
    target = run_dir.path / FOLDER
    if program is None or target.exists():
        return
    files = program.files()
    temporary = run_dir.path / f".{FOLDER}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / program.start).mkdir(parents=True)
    for name, file in files.items():
        if file.link is None:
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            if file.executable:
                path.chmod(path.stat().st_mode | 0o111)
    # links last, so that no file is written through one
    for name, file in files.items():
        if file.link is not None:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file.link, temporary / name)
    _link_originals(program, temporary)
    os.rename(temporary, target)


def _link_originals(program: ProgramOrder, folder: Path) -> None:
    """Link what is not part of the program, if this node has it."""
    for name in program.originals:
        source, path = Path(program.folder) / name, folder / name
        if os.path.lexists(source) and path.parent.is_dir() and not os.path.lexists(path):
            os.symlink(source, path)
