"""Keeps a checkpoint of one run for another: the same files under a second name, so that either may
delete its own.

Hard links where the file system has them, else copies. Does not know what a checkpoint holds, nor
when it is complete
but for its manifest.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

MANIFEST = "manifest.json"


def keep(home: Path, source: str, target: str) -> bool:
    """True when `target` is there, from now or before; False where there is no whole `source`.

    Paths are relative to the node's home. Raises ValueError for one that does not lie under
    `runs/`, OSError for a disk
    that is full or cannot be written.
    """
    for path in (PurePosixPath(source), PurePosixPath(target)):
        if (
            path.is_absolute()
            or ".." in path.parts
            or path.parts[:1] != ("runs",)
            or len(path.parts) < 3
        ):
            raise ValueError(f"{path} is not a checkpoint under runs/")
    wanted, found = home / target, home / source
    if (wanted / MANIFEST).is_file():
        return True
    if not (found / MANIFEST).is_file():
        return False
    beside = wanted.with_name(f".kept-{wanted.name}.{os.getpid()}")
    beside.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        shutil.copytree(found, beside, copy_function=_linked)
        os.rename(beside, wanted)
    except (FileNotFoundError, shutil.Error):  # its writer deleted it meanwhile
        return (wanted / MANIFEST).is_file()
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return True


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # no hard links here, or another device
        shutil.copy2(source, target)
    return target
