"""Small file systems that can be filled: for all nodes, for the database, and for the broker.

Needs root to mount them; without it, disks are never full.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

SIZE = "400m"
_BALLAST = ".ballast"
_BLOCKS = (1 << 20, 4096, 1)  # bytes; the last ones leave no byte free


class Disk:
    """A file system in memory, mounted at a folder; `fill` leaves no space for anyone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ballast = folder, folder / _BALLAST
        options = f"size={SIZE},mode=700"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "orrery-chaos", str(folder)],
            check=True,
            capture_output=True,
        )

    def fill(self) -> None:
        """Use all space that is left."""
        file = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in _BLOCKS:
                with suppress(OSError):
                    while os.write(file, bytes(size)) > 0:
                        pass
        finally:
            os.close(file)

    def free(self) -> None:
        """Release the space."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount; the files stay in the folder."""
        self.free()
        saved = self._folder.with_name(f"{self._folder.name}.saved")
        shutil.copytree(self._folder, saved, symlinks=True, ignore_dangling_symlinks=True)
        subprocess.run(["umount", "-l", str(self._folder)], check=True, capture_output=True)
        self._folder.rmdir()
        saved.rename(self._folder)


def create_disks(folders: dict[str, Path]) -> dict[str, Disk]:
    """One disk per name; an empty dict if this user may not mount."""
    disks: dict[str, Disk] = {}
    if os.geteuid() != 0:
        return disks
    try:
        for name, folder in folders.items():
            disks[name] = Disk(folder)
    except (OSError, subprocess.CalledProcessError):
        for disk in disks.values():
            disk.close()
        return {}
    return disks
