"""Gives the files of a folder second names, so that the first ones may be deleted.

Hard links if the file system supports them, else copies. Standard library only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link_tree(source: Path, target: Path) -> None:
    """Create the folder `target` with the files of `source`. Raises OSError and shutil.Error."""
    shutil.copytree(source, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # no hard links, or another device
        shutil.copy2(source, target)
    return target
