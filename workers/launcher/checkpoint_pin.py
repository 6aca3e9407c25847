"""Pins a checkpoint of one run for another: the same files under a second name.

Either run may delete its own name. Hard links if the file system supports them, else copies.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

from workers.store.links import link_tree

MANIFEST = "manifest.json"


def pin_checkpoint(home: Path, source: str, target: str) -> bool:
    """Whether `target` exists afterwards; False if `source` is missing or incomplete.

    Paths are relative to the node's home. Raises ValueError for one that is not under `runs/`,
    OSError for a full or unwritable disk.
    """
    for path in (PurePosixPath(source), PurePosixPath(target)):
        if (
            path.is_absolute()
            or ".." in path.parts
            or path.parts[:1] != ("runs",)
            or len(path.parts) < 3
        ):
            raise ValueError(f"{path} is not a checkpoint under runs/")
    pinned, original = home / target, home / source
    if (pinned / MANIFEST).is_file():
        return True
    if not (original / MANIFEST).is_file():
        return False
    temporary = pinned.with_name(f".kept-{pinned.name}.{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        link_tree(original, temporary)
        os.rename(temporary, pinned)
    except (FileNotFoundError, shutil.Error):  # its writer deleted it meanwhile
        return (pinned / MANIFEST).is_file()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True
